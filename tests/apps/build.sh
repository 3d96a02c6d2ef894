#!/usr/bin/env bash
# Builds the sample programs. See --help.
set -euo pipefail

usage() {
	cat <<'HELP'
Builds the sample programs of tests/apps: allocates, churn, copies, engine,
engine_regions, guest, handlers, hog, overhead, overhead_driver, odd, stream_ordered, torture, trainer,
and copies engine.py beside them.

usage: tests/apps/build.sh OUTDIR [LIBDIR]

  OUTDIR   directory for the programs; created if necessary
  LIBDIR   folder with libcudart.so (or libcudart.so.13, .12, .11.0) to link with,
           from a CUDA toolkit, a Python package or the simulated GPU. Default:
           $CUDA_HOME/lib64, the toolkit of the nvcc on PATH, /usr/local/cuda/lib64,
           then the linker's own search path.

Needs a C compiler ($CC, else cc), but no CUDA toolkit and no GPU: the prototypes
are in cudart.h and cudadriver.h. Programs contain no path of the library and find libcudart at
start like any other program, through ldconfig or LD_LIBRARY_PATH. Does nothing if OUTDIR has
them, built from these sources.
HELP
}

fail() {
	printf 'build.sh: %s\n' "$1" >&2
	exit 1
}

# The linker's option for the runtime in a folder. Not always -lcudart: Python packages
# contain only the versioned file.
runtime_in() {
	local name
	for name in libcudart.so libcudart.so.13 libcudart.so.12 libcudart.so.11.0; do
		if [[ -e $1/$name ]]; then
			if [[ $name == libcudart.so ]]; then printf -- '-lcudart'; else printf -- '-l:%s' "$name"; fi
			return 0
		fi
	done
	return 1
}

toolkit_folders() {
	local nvcc
	if [[ -n ${CUDA_HOME:-} ]]; then printf '%s/lib64\n' "$CUDA_HOME"; fi
	if nvcc=$(command -v nvcc); then
		printf '%s/lib64\n' "$(dirname "$(dirname "$(readlink -f "$nvcc")")")"
	fi
	printf '/usr/local/cuda/lib64\n'
}

case ${1:-} in
-h | --help) usage; exit 0 ;;
'' | -*) usage >&2; exit 2 ;;
esac
(($# <= 2)) || { usage >&2; exit 2; }

source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$1
compiler=${CC:-cc}
command -v "$compiler" >/dev/null ||
	fail "no C compiler ($compiler). Install gcc (Debian, Ubuntu: apt-get install gcc libc6-dev) or set CC."

library=-lcudart
folder=${2:-}
if [[ -n $folder ]]; then
	library=$(runtime_in "$folder") ||
		fail "no libcudart.so in $folder. Give the lib64 of a CUDA toolkit, or the folder of the simulated runtime."
else
	while read -r candidate; do
		if library=$(runtime_in "$candidate"); then folder=$candidate; break; fi
		library=-lcudart
	done < <(toolkit_folders)
fi
# libcudart's own dependencies must exist when the program runs, but not now.
link=("$library" "-Wl,--allow-shlib-undefined" -ldl -lpthread)
if [[ -n $folder ]]; then link=("-L$folder" "${link[@]}"); fi

# One at a time: tests that start together share a folder. Who comes later finds all built.
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9 || fail "flock is needed to build one at a time (Debian, Ubuntu: apt-get install util-linux)"
wanted="$compiler $library" built=$out/.built
if [[ -e $built && $(<"$built") == "$wanted" && -z $(find "$source_dir" -newer "$built" -print -quit) ]]; then exit 0; fi
rm -f "$built"

# Build in a temporary folder, then move: running programs never see half a file.
work=$(mktemp -d "$out/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "$wanted" >"$work/.built"

compile() { # name, sources…
	local name=$1
	shift
	"$compiler" -std=c11 -O2 -g -o "$work/$name" \
		"${@/#/$source_dir/}" "${link[@]}" ||
		fail "$name does not build or link (linked with: ${link[*]}).
If libcudart is missing, give its folder as the second argument."
}

compile engine engine.c engine_core.c pattern.c
compile engine_regions engine_regions.c engine_core.c pattern.c
compile allocates allocates.c
compile churn churn.c
compile guest guest.c
compile handlers handlers.c
compile hog hog.c pattern.c
compile overhead overhead.c
compile overhead_driver overhead_driver.c
compile copies copies.c
compile odd odd.c
compile stream_ordered stream_ordered.c
compile torture torture.c
compile trainer trainer.c
install -m 755 "$source_dir/engine.py" "$work/engine.py"
mv -f "$work"/* "$out"/
# As old as the start: what was edited since is newer.
mv -f "$work/.built" "$built"
