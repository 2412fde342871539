#!/usr/bin/env bash
# contrib/bench/all.sh [WORD…]: every benchmark on every link it has a goal for, one after the other, half an hour. With WORDs only those whose
# command has one of them: all.sh warm.py ocean-1. Root, on a machine with nothing else to do; `contrib/setup bench` first. $PYTHON is the Python of an
# environment that has gpurun, else .venv/bin/python. The plot goes to $PLOT, else to scale.svg beside this.
set -u
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
words=("$@") failed=() began=$SECONDS

bench() {
    local word wanted=$((${#words[@]} == 0)) started=$SECONDS
    for word in ${words[@]+"${words[@]}"}; do [[ "$*" == *"$word"* ]] && wanted=1; done
    [ "$wanted" = 1 ] || return 0
    [ -z "${fresh:-}" ] || new_disk
    echo "==== $*"
    "$python" "$here/$1" "${@:2}" || failed+=("$*")
    echo "==== took $((SECONDS - started)) s"
    echo
    [ -z "${fresh:-}" ] || end_disk
}

# A new file system for those that make many files: on ext4 creating one takes five times as long for minutes after many were deleted, as the
# benchmark before this one did at its end, and gpurun makes twice as many as rsync.
new_disk() {
    outside=${TMPDIR-} disk=$(mktemp -d)
    truncate -s 48G "$disk/image"
    if mkfs.ext4 -q -N 3000000 -E lazy_itable_init=0,lazy_journal_init=0 "$disk/image" && mkdir "$disk/mounted" && mount -o loop "$disk/image" "$disk/mounted"; then
        export TMPDIR=$disk/mounted
    else
        echo "no file system of its own for this one: what was deleted here lately makes it slower"
    fi
}
end_disk() {
    if [ "$outside" ]; then export TMPDIR=$outside; else unset TMPDIR; fi
    ! mountpoint -q "$disk/mounted" || umount "$disk/mounted"
    rm -rf "$disk/image"
    rmdir "$disk"/mounted "$disk"
}
trap '[ -z "${disk:-}" ] || [ ! -d "$disk" ] || end_disk' EXIT

bench startup.py
for link in loopback lan coast ocean; do bench warm.py --link $link; done
bench roundtrips.py --runs 2
for link in loopback lan ocean; do fresh=1 bench push.py --link $link --runs 3; done
fresh=1 bench push.py --link ocean --kind text --runs 2
for link in loopback lan ocean; do fresh=1 bench push.py --link $link --files 100000 --size 1000 --runs 1 --unmeasured 0; done
bench pull.py --bytes 1G --runs 3
bench pull.py --bytes 4G --runs 1 --unmeasured 0
bench pull.py --link lan --bytes 1G --runs 1 --unmeasured 0
bench pull.py --link ocean --bytes 200M --runs 1 --unmeasured 0
for link in ocean-0.1 ocean-1; do bench pull.py --link $link --bytes 40M --runs 1 --unmeasured 0; done
for link in loopback ocean; do bench logs.py --link $link; done
fresh=1 bench scale.py --max-bytes 4G --out "${PLOT:-$here/scale.svg}"

echo "in all $((SECONDS - began)) s"
[ ${#failed[@]} = 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
