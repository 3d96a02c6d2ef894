# Sourced by scripts/demo and scripts/measure/setup.py. Finds the GPU, the
# CUDA runtime and the built programs, or says how to get them.
# shellcheck shell=bash

# Reports what is missing and how to get it, and ends the script.
missing() { # what, how
	printf '%s: %s is missing.\n  %s\n' "${0##*/}" "$1" "$2" >&2
	exit 1
}

need_command() { # command, how to get it
	command -v "$1" >/dev/null || missing "the command \`$1\`" "$2"
}

# Whether there is a GPU whose driver answers.
real_gpu() {
	command -v nvidia-smi >/dev/null && [[ $(nvidia-smi -L 2>/dev/null) == GPU\ * ]]
}

# Whether this shell runs under scripts/simgpu.
on_simulated_gpu() {
	[[ -n ${SIMGPU_DIR:-} ]]
}

# Folders that may contain a libcudart, likeliest first.
libcudart_folders() {
	local nvcc
	tr ':' '\n' <<<"${LD_LIBRARY_PATH:-}"
	if on_simulated_gpu; then return; fi
	if [[ -n ${CUDA_HOME:-} ]]; then printf '%s/lib64\n' "$CUDA_HOME"; fi
	if nvcc=$(command -v nvcc); then
		printf '%s/lib64\n' "$(dirname "$(dirname "$(readlink -f "$nvcc")")")"
	fi
	printf '%s\n' /usr/local/cuda/lib64
	{ ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null || true; } |
		sed -n 's|.*libcudart\.so[^ ]* .*=> \(.*\)/[^/]*$|\1|p'
	# PyTorch's wheels contain one in site-packages/nvidia.
	if command -v python3 >/dev/null; then
		python3 -c 'import glob, os, sys
for path in sys.path:
    for pattern in ("nvidia/*/lib", "nvidia/*/lib64"):
        for folder in sorted(glob.glob(os.path.join(path, pattern)), reverse=True):
            print(folder)' || true
	fi
}

# Prints the folder of a libcudart with which programs can be linked and run.
find_libcudart() {
	local folders folder
	folders=$(libcudart_folders)
	while read -r folder; do
		if [[ -n $folder ]] && compgen -G "$folder/libcudart.so*" >/dev/null; then
			printf '%s\n' "$folder"
			return 0
		fi
	done <<<"$folders"
	return 1
}

# Puts that folder on LD_LIBRARY_PATH and in $libcudart, or says how to get one and ends
# the script.
use_libcudart() {
	local folder
	folder=$(find_libcudart) || missing "the CUDA runtime (libcudart.so)" \
		"Install the CUDA toolkit, or \`pip install nvidia-cuda-runtime\`; without a GPU: scripts/simgpu ${0##*/} …"
	case ":${LD_LIBRARY_PATH:-}:" in
	*":$folder:"*) ;;
	*) export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} ;;
	esac
	# shellcheck disable=SC2034 # for the script that sources this
	libcudart=$folder
}

# One number of GPU 0, in MiB: used, free or total.
gpu_mib() {
	if on_simulated_gpu; then
		local bytes
		bytes=$(simgpu-smi --json | sed -n "s/.*\"device\":0,[^{}]*\"$1\":\([0-9]*\).*/\1/p")
		# Round like nvidia-smi: memory in use up, the others down.
		if [[ $1 == used ]]; then bytes=$((bytes + (1 << 20) - 1)); fi
		printf '%s\n' $((bytes >> 20))
	else
		nvidia-smi --id=0 --query-gpu="memory.$1" --format=csv,noheader,nounits
	fi
}

gpu_name() {
	if on_simulated_gpu; then
		printf 'simulated GPU\n'
	else
		nvidia-smi --id=0 --query-gpu=name --format=csv,noheader
	fi
}

# The folder of cargo's release builds.
release_folder() { # project root
	printf '%s/release\n' "${CARGO_TARGET_DIR:-$1/target}"
}

build_vramctl() { # project root; options of cargo (default: the release build)
	local root=$1
	shift
	if (($# == 0)); then set -- --release; fi
	need_command cargo "Install Rust from https://rustup.rs (curl https://sh.rustup.rs -sSf | sh)."
	local quiet=(--quiet)
	# The first build takes minutes: on a terminal, show cargo's progress.
	if [[ -t 2 ]]; then quiet=(); fi
	(cd "$root" && cargo build "$@" --locked ${quiet[@]+"${quiet[@]}"}) >&2
}
