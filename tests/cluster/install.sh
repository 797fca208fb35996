#!/bin/sh
# Installs what the tests of real clusters need, where that is possible; says what is missing otherwise.
set -u
missing=""
for pair in ssh:openssh-client sshd:openssh-server pdsh:pdsh mpirun.openmpi:openmpi-bin mpirun.mpich:mpich \
  slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge ip:iproute2 numactl:numactl; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" > /dev/null || missing="$missing ${pair##*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "test-cluster: not installed, and only root of a Debian system can install it:$missing"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
(apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing) > /tmp/mizzen-install.log 2>&1 ||
  { echo "test-cluster: cannot install:$missing"; tail -n 3 /tmp/mizzen-install.log; }
