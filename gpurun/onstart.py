"""What a rented machine does at each start of its container, before anybody is there: it lets us in, and it ends itself if nobody comes.

The provider keeps this text and runs it at every start, also when a machine that was stopped comes back by itself days later. So it starts no
job; it lets the operator's key in and leaves one process behind, the switch, which ends the machine when

- no agent has shown for `lease_s` that it works (the time of `<node_dir>/agent/alive` is the same), or
- `end_s` have passed since the first start, which a file remembers: a start later on gets no time of its own.

Time is the machine's uptime, which nobody sets; only since the first start it is the wall clock's. An agent that came up meanwhile keeps the
machine from the first of the two. Which process is the switch is said by a link; a second one sees it and leaves, one that is gone is replaced.
The key with which a container may end itself goes to curl and Python over stdin, to wget (which takes it no other way) in a file in memory
that only root can read, never in a command line.
"""

from __future__ import annotations

import math
import posixpath
import re
import shlex

from gpurun.errors import ConfigError

MAX_BYTES = 4000              # the provider takes 4096 at most, with what it adds
STEP_S = 10                   # between looks; an agent shows itself every 10 s

# For dash and busybox as well. The switch stands in single quotes and has none itself. Its $1: the file that an agent touches, $2: the folder of
# our marks. What could fail on a full disk fails for itself; then there may be two switches, but never none. A switch that was killed may stay a
# zombie: not every container's first process reaps.
SCRIPT = r"""R=${HOME:-/root}; touch "$R/.no_auto_tmux"
D=@node_dir@ B=@above@ P=@public_key@
mkdir -p "$B"
rm -f "$B/.gpurun-onstart"
(umask 077; mkdir -p "$R/.ssh"; F=$R/.ssh/authorized_keys
[ ! -s "$F" ] || [ -z "$(tail -c 1 "$F")" ] || echo >>"$F"
grep -qsF "$P" "$F" || echo "$P gpurun" >>"$F"
chown "$(id -u)" "$R/.ssh" "$F"; chmod 700 "$R/.ssh"; chmod 600 "$F")
[ -s "$B/.gpurun-first" ] || date +%s >"$B/.gpurun-first"
S='trap "" HUP
A=$1 B=$2 L=$2/.gpurun-switch p=1 n=0
up() { read -r u x </proc/uptime; u=${u%%.*}; }
life() { m=$(stat -c %Y "$A" || date -r "$A"); }
born() { l=; read -r l <"/proc/$1/stat"; set -- ${l##*) }; [ "$1" = Z ] || echo "${20}"; }
only() {
 o=$(readlink "$L")
 [ "$o" != "$me" ] || return
 [ -z "$o" ] || [ "$(born "${o%-*}")" != "${o#*-}" ] || exit 0
 ln -sfn "$me" "$L"
}
get() {
 eval "v=\$$1"
 [ -n "$v" ] || v=$(tr "\000" "\n" </proc/1/environ | sed -n "s/^$1=//p" | head -n 1)
 [ -n "$v" ] || v=$(sed -n "s/^ *\(export \)*$1=//p" /etc/environment | head -n 1)
 v=$(echo "$v" | tr -d "\042\047\015 ")
}
ask() {
 c=; [ "$n" -lt 5 ] || c=-k
 echo "header = \"Authorization: Bearer $k\"" |
  curl -q -s $c -m 20 -X "$1" -H "Content-Type: application/json" -d "$2" -K - "$U" ||
 echo "$k" | python3 -c "import sys, urllib.request as r
h = {\"Content-Type\": \"application/json\", \"Authorization\": \"Bearer \" + input()}
r.urlopen(r.Request(sys.argv[2], sys.argv[3].encode(), h, method=sys.argv[1]), timeout=20)" "$1" "$U" "$2" || {
  W=$(umask 077; mktemp -p /dev/shm || mktemp)
  echo "header = Authorization: Bearer $k" >"$W"
  WGETRC=$W wget -qO - -T 20 -t 1 --method="$1" --header="Content-Type: application/json" --body-data="$2" "$U"
  rm -f "$W"
 }
}
finish() {
 get CONTAINER_API_KEY; k=$v
 get CONTAINER_ID; [ -n "$v" ] || get VAST_CONTAINERLABEL
 U=@api@/api/v0/instances/${v#C.}/
 ask DELETE "{}"
 n=$((n+1))
 [ "$n" -lt 3 ] || ask PUT "{\"state\": \"stopped\"}"
 sleep $p
 p=$((p*2)); [ $p -lt 60 ] || p=60
}
me=$$-$(born $$)
only; sleep 1; only
up; T=$u; life; M=$m
w=$(date +%s); f=$(cat "$B/.gpurun-first")
case $f in ""|*[!0-9]*) f=$w;; esac
[ "$f" -le "$w" ] || f=$w
E=$((u+f+@end_s@-w))
while :; do
 only; up; life
 [ "$m" = "$M" ] || { M=$m; T=$u; }
 if [ $((u-T)) -ge @lease_s@ ] || { [ @end_s@ -gt 0 ] && [ "$u" -ge "$E" ]; }; then finish
 else p=1; n=0; sleep @step_s@; fi
done'
X=setsid; command -v setsid >/dev/null || X=
$X sh -c "$S" gpurun-switch "$D/agent/alive" "$B" </dev/null >/dev/null 2>&1 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- &
echo done >"$B/.gpurun-onstart"
"""


def script(public_key: str, lease_s: float, end_s: float, node_dir: str, api: str) -> str:
    """The text for the provider's `onstart`. `end_s` 0: only the lease. ConfigError when it would be too long, or when it couldn't work."""
    words = public_key.split()
    if len(words) < 2 or not all(re.fullmatch(r"[!-~]+", word) for word in words[:2]) or "'" in words[0] + words[1]:
        raise ConfigError(f"this isn't the public half of an ssh key: {public_key[:80]!r}")
    if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]/_~-]+", api):
        raise ConfigError(f"the address of the provider's API is no http(s) URL that a shell takes as it is: {api[:200]!r}")
    if not (math.isfinite(lease_s) and lease_s > 0 and math.isfinite(end_s) and end_s >= 0):
        raise ConfigError(f"a machine can't have a lease of {lease_s:g} s and an end after {end_s:g} s")
    node_dir = posixpath.normpath(node_dir)
    if not re.match(r"(/|~/)[^\n\0]", node_dir):
        raise ConfigError(f"node_dir must begin with / or ~/ and isn't the root: {node_dir[:200]!r}")
    lease, end = math.ceil(lease_s), math.ceil(end_s)
    step = max(1, min(STEP_S, lease // 4, end // 4 if end else STEP_S))
    values = {"node_dir": _path(node_dir), "above": _path(posixpath.dirname(node_dir)), "public_key": shlex.quote(" ".join(words[:2])),
              "api": api.rstrip("/"), "lease_s": str(lease), "end_s": str(end), "step_s": str(step)}
    text = re.sub(r"@(\w+)@", lambda found: values[found.group(1)], SCRIPT)
    size = len(text.encode())
    if size >= MAX_BYTES:
        raise ConfigError(f"what the machine is to do at its start has {size} bytes and less than {MAX_BYTES} are allowed: use a shorter node_dir, "
                          "or an ed25519 key")
    return text


def _path(path: str) -> str:
    """A word of the script; ~ is the home that it has found."""
    return '"$R"' + (shlex.quote(path[1:]) if path != "~" else "") if path.startswith("~") else shlex.quote(path)
