#!/bin/sh
# `vramctl resume` for containers without the binary. See --help.
. "$(dirname "$0")/control.sh"
control resume "$@"
