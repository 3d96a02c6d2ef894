#!/bin/sh
# `vramctl pause` for containers without the binary. See --help.
. "$(dirname "$0")/control.sh"
control pause "$@"
