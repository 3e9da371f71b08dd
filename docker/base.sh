#!/bin/sh
# What every container stands on: Debian packages (unless the base has them), a user, the folders it may write.
set -eu
packages=$(cat /opt/base/packages.txt)
if ! dpkg -s $packages >/dev/null 2>&1; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
    rm -rf /var/lib/apt/lists/*
fi
useradd --system --uid 550 --user-group --home-dir /var/lib/roq roq
install -d -o roq -g roq /var/lib/roq /var/lib/zookeeper
install -d -m 755 /etc/roq
