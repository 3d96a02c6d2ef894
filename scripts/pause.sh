#!/bin/sh
# `vramctl pause` for containers without the binary. See --help.
. "$(dirname "$(readlink -f "$0" 2>/dev/null || printf %s "$0")")/control.sh"
control pause "$@"
