#!/bin/bash
# bash part.sh N: how many primes there are below N, of the numbers that are this process's share. srun says which that is.
set -eu
share=${SLURM_PROCID:-0} of=${SLURM_NTASKS:-1}
awk -v n="$1" -v share="$share" -v of="$of" 'BEGIN {
  for (i = 2; i < n; i++) {
    if (int(i / 2) % of != share) continue     # two neighbours at a time, so that nobody gets only the even ones
    prime = 1
    for (d = 2; d * d <= i; d++) if (i % d == 0) { prime = 0; break }
    count += prime
  }
  print count + 0
}' > "parts/$share"
echo "${SLURMD_NODENAME:-here}: $(cat "parts/$share") primes"
