#!/bin/sh
# Takes out of a Debian what no daemon's container runs: package tools, Perl, file systems, logins, documentation, pip. The list
# of what was installed (/var/lib/dpkg/status) stays, for scanners.
set -eu
installed() { dpkg-query -W -f '${Package}\n' | sort; }

unwanted="apt libapt-pkg6.0 libapt-pkg7.0 gpgv sqv debian-archive-keyring debconf adduser login login.defs passwd mount
    util-linux util-linux-extra e2fsprogs logsave libext2fs2 libss2 perl-base diffutils bash ncurses-bin ncurses-base
    sysvinit-utils init-system-helpers usr-is-merged libpam-runtime libpam-modules libpam-modules-bin
    libgnutls30 libp11-kit0 libgcrypt20 libsystemd0 libudev1 libsemanage2 libsemanage-common libsepol2 libmount1 libfdisk1
    libsmartcols1 libdb5.3 libunistring2 libidn2-0 tzdata"
gone=$(installed | grep -Fx "$(printf '%s\n' $unwanted)")
rm -f /var/lib/dpkg/info/*.prerm /var/lib/dpkg/info/*.postrm # no service to stop; debconf goes with the rest
# shellcheck disable=SC2086  # one word per package
dpkg --purge --force-depends --force-remove-essential --force-remove-protected $gone >/tmp/purged 2>&1 || {
    tail -n 5 /tmp/purged >&2
    exit 1
}
rm -rf /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/idlelib \
    /usr/local/lib/python3*/test /usr/local/bin/pip* /usr/local/bin/idle* /usr/local/bin/pydoc* \
    /usr/share/doc /usr/share/man /usr/share/info /usr/share/locale /usr/lib/*/gconv /usr/lib/*/perl-base \
    /usr/lib/python3*/pydoc_data /usr/lib/python3*/ensurepip \
    /usr/bin/dpkg* /var/cache/* /var/log/* /opt/base /tmp/*
