#!/bin/sh
# The first process of the guest.
/bin/busybox mount -t devtmpfs dev /dev
exec < /dev/null > /dev/console 2>&1
export PATH=/bin HOME=/root RUST_BACKTRACE=0
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
ip link set lo up
while read -r module parameters; do
    # shellcheck disable=SC2086 # one word each
    insmod "/modules/$module.ko" $parameters || echo "cannot load $module"
done < /modules/list
HOLDFAST_VM_AGENT=1 agent --ignored --exact --nocapture agent
poweroff -f
