#!/bin/sh
# Stands between vramctl and CRIU ($REAL), and waits or kills somebody before or after CRIU runs: dump-before, restore-after and so on.
#   HOLD=MOMENT PLACE=FILE    waits there until FILE.go is there; FILE.reached says that it waits
#   KILL=MOMENT VICTIM=WHO    kills: command (whoever runs CRIU), criu (this one), or a process id
#   KILL=restore-during VICTIM=SECONDS    kills CRIU itself so long after it has begun
at() {
	if [ "$1" = "$HOLD" ]; then
		: >"$PLACE.reached"
		while ! [ -e "$PLACE.go" ]; do sleep 0.01; done
	fi
	[ "$1" = "$KILL" ] || return 0
	case $VICTIM in
	command) kill -9 "$PPID" ;;
	criu) kill -9 $$ ;;
	*) kill -9 "$VICTIM" ;;
	esac
}
at "$1-before"
if [ "$1-during" = "$KILL" ]; then
	"$REAL" "$@" &
	sleep "$VICTIM"
	kill -9 $!
	wait $!
else
	"$REAL" "$@"
fi
code=$?
at "$1-after"
exit $code
