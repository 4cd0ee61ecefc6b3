"""Where a path leads: this machine's disks, the hub, a web server, a bucket. The network's libraries are used here."""
