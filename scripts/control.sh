# shellcheck shell=sh
# Talks to the control sockets of managed processes (docs/protocol.md), for containers without the `vramctl` binary. Sourced by
# pause.sh and resume.sh. Needs a POSIX shell, cat, dirname, id, ls, and one of socat, nc (with -U) or python3.

set -u

usage() {
	only_pause='' unsupported='process names' held=''
	if [ "$1" = pause ]; then
		only_pause=' [--discard] [--force] [--no-hold | --hold-timeout SECONDS]'
		unsupported="$unsupported, jobs of several processes, asking an inference engine first, and --backup other than --discard"
		held="
The program is held until everything is resumed: its calls that start GPU work wait. --hold-timeout: how long to wait for work in
flight [default: --timeout, or 10]. With --no-hold, the program must be idle, or not use the paused memory."
	fi
	cat <<HELP
usage: $1.sh [TAG…] [--pid PID | --all]$only_pause [--timeout SECONDS]

Like \`vramctl $1\`, but one process after another, and needs only a shell and one of socat, nc (with -U) or python3.
Not supported: $unsupported.$held
Without tags: all tags. Without --pid or --all: the only managed process.
With --all and one tag, skips processes without it; with several tags, every process must have them all.
Prints each process's answer, one line of JSON. Waits without limit: a stopped process answers when it continues.

Exit codes: 0 done, 1 refused or failed, 2 wrong arguments, or several processes and none chosen,
3 no such process, 4 not enough memory, 5 timed out, busy, or suspended, 6 no such tag.
HELP
}

# Exits with a code and a message.
die() {
	code=$1
	shift
	printf 'error: %s\n' "$*" >&2
	exit "$code"
}

# Runs the script. Arguments: the request (pause or resume), then the script's own.
control() {
	request=$1
	shift
	read_arguments "$@"
	find_directory
	choose_transport
	choose_processes
	if [ "$request" = pause ]; then
		refuse_jobs
		[ -z "$hold" ] || fields="$fields${tab}hold_ms=$hold"
	fi

	message="version=1${tab}request=$request$fields"
	result=0 did=''
	for pid in $pids; do
		[ "$target" != all ] || printf 'process %s:\n' "$pid" >&2
		# The request asks for no progress, so the first line is the answer.
		answer=$(cd "$directory" && exchange "./$pid.sock" "$message")
		answer=${answer%%"$newline"*}
		[ -z "$answer" ] || printf '%s\n' "$answer"
		code=$(judge "$answer")
		case $code in
		0) did=yes ;;
		6) [ "$target$count" != all1 ] || code=0 lacking=yes ;;
		esac
		[ "$result" != 0 ] || result=$code
	done
	# With --all, a tag that no process has is an error.
	[ "$result" != 0 ] || [ -z "${lacking:-}" ] || [ -n "$did" ] || result=6
	exit "$result"
}

newline='
'
tab=$(printf '\t')

# Sets fields (of the request), count (of tags), target (a pid, `all` or nothing), hold (how many milliseconds to wait for work in
# flight; nothing if the program is not to be held).
read_arguments() {
	fields='' count=0 target='' hold='' no_hold='' timeout=''
	while [ $# -gt 0 ]; do
		case $1 in
		-h | --help) usage "$request"; exit 0 ;;
		--all) choose_target all ;;
		--pid)
			case ${2:-} in '' | *[!0-9-]* | -*) die 2 "--pid needs a process id" ;; esac
			choose_target "$2"
			shift
			;;
		--timeout)
			timeout=$(milliseconds "${2:-}") || die 2 "--timeout needs a number of seconds, for example 30 or 2.5"
			shift
			;;
		--no-hold)
			[ "$request" = pause ] || die 2 "--no-hold is for a pause"
			no_hold=yes
			;;
		--hold-timeout)
			[ "$request" = pause ] || die 2 "--hold-timeout is for a pause"
			hold=$(milliseconds "${2:-}") || die 2 "--hold-timeout needs a number of seconds, for example 30 or 2.5"
			shift
			;;
		--force)
			[ "$request" = pause ] || die 2 "--force is for a pause"
			fields="$fields${tab}force=true"
			;;
		--discard)
			[ "$request" = pause ] || die 2 "--discard is for a pause"
			fields="$fields${tab}backup=discard"
			;;
		--) shift; break ;;
		-*) usage "$request" >&2; die 2 "unknown option $1" ;;
		*) add_tag "$1" ;;
		esac
		shift
	done
	for tag in "$@"; do add_tag "$tag"; done
	[ -z "$timeout" ] || fields="$fields${tab}timeout_ms=$timeout"
	[ -z "$no_hold" ] || [ -z "$hold" ] || die 2 "--no-hold and --hold-timeout exclude each other"
	[ -n "$no_hold" ] || hold=${hold:-${timeout:-10000}}
}

choose_target() {
	[ -z "$target" ] || die 2 "--pid and --all exclude each other"
	target=$1
}

add_tag() {
	# The request's fields have a tab between them.
	case $1 in *[[:cntrl:]]*) die 2 "a tag has no control characters" ;; esac
	fields="$fields${tab}tags=$1"
	count=$((count + 1))
}

# Converts seconds, with or without a fraction, to whole milliseconds.
milliseconds() {
	case $1 in '' | . | *[!0-9.]* | *.*.*) return 1 ;; esac
	whole=${1%%.*} fraction=000
	case $1 in *.*) fraction=${1#*.}000 ;; esac
	# Concatenates digits instead of computing: shell arithmetic reads a leading zero as octal.
	result=$whole${fraction%"${fraction#???}"}
	while case $result in 0?*) ;; *) false ;; esac; do result=${result#0}; done
	[ ${#result} -le 18 ] && printf '%s' "$result"
}

# Sets directory to that of the sockets, after checking it: not a symbolic link, owned by the user, closed to others.
find_directory() {
	user=$(id -u)
	if [ -n "${VRAMCTL_DIR:-}" ]; then
		directory=$VRAMCTL_DIR
	elif [ -n "${XDG_RUNTIME_DIR:-}" ]; then
		directory=$XDG_RUNTIME_DIR/vramctl
	else
		directory=/tmp/vramctl-$user
	fi
	# A relative path gets a slash too, so that no command takes it for an option.
	case $directory in /*) ;; *) directory=./$directory ;; esac
	[ -d "$directory" ] || [ -L "$directory" ] || die 3 "no process is managed: $directory does not exist (VRAMCTL_DIR sets where to look)"
	# The first and third word are the mode and the owner.
	# shellcheck disable=SC2046
	set -- $(LC_ALL=C ls -ldn "$directory")
	case $1 in
	l*) die 1 "$directory is a symbolic link; set VRAMCTL_DIR to the directory itself" ;;
	d???------*) ;;
	*) die 1 "$directory is open to other users; chmod 700 it if only you use it, else set VRAMCTL_DIR to a directory of your own" ;;
	esac
	[ "$3" = "$user" ] || [ "$user" = 0 ] || die 1 "$directory is owned by user $3, not by you; set VRAMCTL_DIR to a directory of yours"
}

# Sets pids.
choose_processes() {
	pids=''
	for socket in "$directory"/*.sock; do
		pid=${socket##*/}
		pid=${pid%.sock}
		# In containers that share the directory, one of two with the same pid has its PID namespace in the name.
		case $pid in *[!0-9-]* | -*) continue ;; esac
		if [ -S "$socket" ] && ! is_stale "$pid"; then pids="$pids $pid"; fi
	done
	[ -n "$pids" ] || die 3 "no process is managed (looked in $directory)"
	case $target in
	all) ;;
	'')
		case ${pids# } in *' '*) die 2 "several processes are managed; choose with --pid or --all:$pids" ;; esac
		;;
	*)
		case " $pids " in *" $target "*) ;; *) die 3 "process $target is not managed; managed are:$pids" ;; esac
		pids=$target
		;;
	esac
}

# Refuses to pause several processes of one job. This script asks one after another, so an error would leave half of the job paused, and
# the work of a process that waits in a collective for a held one would not finish.
refuse_jobs() {
	case ${pids# } in *' '*) ;; *) return ;; esac
	jobs=$newline
	for pid in $pids; do
		answer=$(cd "$directory" && exchange "./$pid.sock" "version=1${tab}request=hello")
		# JSON escapes quotes inside strings, so the patterns match only fields.
		case $answer in *'"job":"'*) ;; *) continue ;; esac
		job=${answer#*'"job":"'}
		job=${job%%'","'*}
		case $jobs in
		*"$newline$job$newline"*)
			die 2 "nothing was paused: process $pid and others are one job, which this script cannot pause as a whole." \
				"Use \`vramctl pause\`, or choose a single process with --pid:$pids"
			;;
		esac
		jobs=$jobs$job$newline
	done
}

# Whether the socket of process $1 is stale: a killed process leaves it behind. Connects instead of checking /proc, which does
# not show the processes of other pid namespaces. Other errors are left for exchange to report.
is_stale() {
	said=$(cd "$directory" && LC_ALL=C && export LC_ALL && connect "./$1.sock" 2>&1 </dev/null) && return 1
	# An old nc prints nothing.
	case $said in '' | *refused* | *'No such file'*) ;; *) return 1 ;; esac
}

# Defines exchange, which connects to socket $1, sends line $2 and prints the reply until the other side hangs up. It shuts down
# its own side after the line, so the process hangs up after its answer, however long that takes.
# Defines connect, which connects to socket $1 and hangs up, without waiting for a stopped process.
choose_transport() {
	if command -v socat >/dev/null 2>&1; then
		# -t: seconds to wait after the end of the input; the default is half a second.
		exchange() { printf '%s\n' "$2" | socat -t 999999 - "UNIX-CONNECT:$1"; }
		connect() { socat -t 0 - "UNIX-CONNECT:$1"; }
	elif choose_nc_options; then
		exchange() { printf '%s\n' "$2" | nc "$nc_exchange" "$1"; }
		connect() { nc -U "$nc_connect" "$1"; }
	elif command -v python3 >/dev/null 2>&1; then
		exchange() {
			python3 -I -c '
import os, socket, sys
control = socket.socket(socket.AF_UNIX)
try:
    control.connect(sys.argv[1])
    for line in sys.argv[2:]:
        control.sendall(os.fsencode(line) + b"\n")
        control.shutdown(socket.SHUT_WR)
        sys.stdout.buffer.write(control.makefile("rb").read())
except OSError as error:
    sys.exit(str(error))
' "$@"
		}
		connect() { exchange "$1"; }
	else
		die 1 "needs socat, nc with -U (netcat-openbsd, ncat) or python3; install one, or use the vramctl binary"
	fi
}

# Sets the options for a Unix socket with which this nc hangs up after its input (nc_exchange), and at once or after a second of
# silence (nc_connect). Not -z: an old nc always fails with it.
choose_nc_options() {
	command -v nc >/dev/null 2>&1 || return 1
	case $(nc -h 2>&1) in
	*Ncat*) nc_exchange=-U nc_connect=--send-only ;;
	*'socket after EOF on stdin'*UNIX*) nc_exchange=-NU nc_connect=-Nw1 ;;
	# An old nc stays until the process hangs up, half a minute after its answer.
	*UNIX*) nc_exchange=-U nc_connect=-w1 ;;
	*) return 1 ;;
	esac
}

# Prints the exit code for an answer. JSON escapes quotes inside strings, so these patterns match only fields.
judge() {
	case $1 in
	*'"reply":"done"'*) echo 0 ;;
	*'"code":"device_memory"'* | *'"code":"host_memory"'*) echo 4 ;;
	*'"code":"busy"'* | *'"code":"capturing"'* | *'"code":"shared"'* | *'"code":"leased"'* | *'"code":"suspended"'*) echo 5 ;;
	*'"code":"unknown_tag"'*) echo 6 ;;
	*'"code":"not_restorable"'*) echo 7 ;;
	'') printf 'error: the process has ended or does not answer\n' >&2; echo 1 ;;
	*) echo 1 ;;
	esac
}
