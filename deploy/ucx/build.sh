#!/usr/bin/env bash
# Builds UCX with RDMA (verbs, rdmacm, mlx5) into a folder of its own.
#
#   deploy/ucx/build.sh --prefix /opt/ucx [--source DIR] [--cuda [DIR]] [--gdrcopy-source DIR] [--jobs N]
#
#   --prefix DIR          where UCX goes: bin/, include/ and lib/, in which every library has its unversioned name, too
#   --source DIR          a git repository, bare or not, that has UCX's pinned commit; without it, GitHub's is asked
#   --cuda [DIR]          also for GPUs, with the CUDA toolkit in DIR (/usr/local/cuda) and with gdrcopy
#   --gdrcopy-source DIR  the same as --source, for gdrcopy
#   --jobs N              so many compilers at once; all cores by default
#
# It needs, by their names in Debian: git ca-certificates autoconf automake libtool pkg-config make g++ libnuma-dev
# libibverbs-dev librdmacm-dev. At run time the library needs libnuma1, libibverbs1, ibverbs-providers and librdmacm1.
# --cuda needs the toolkit's headers with nvml.h, libcudart, and the stubs of libcuda and libnvidia-ml in lib64/stubs.
# pdserve then runs on it with the environment
#
#   LD_LIBRARY_PATH=/opt/ucx/lib (or the folder in /etc/ld.so.conf.d, and ldconfig)
#   RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true
#
# and `pdserve doctor` says whether it does.
#
# The pin is a commit: its hash covers every file and the history, and git checks it. The project's release tarball has
# generated files besides, and no hash that anybody signs.
set -euo pipefail

# v1.21.0: what libucx-cu13 1.21.0 is built from, so ucxx meets the version that it was tested with.
ucx_url=https://github.com/openucx/ucx.git
ucx_commit=b6a9d47fccce849c28111f05a7fa8f1c930ff17d
# v2.5.1
gdrcopy_url=https://github.com/NVIDIA/gdrcopy.git
gdrcopy_commit=0f7366e73b019e7facf907381f6b0b2f5a1576e4

usage() {
	sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0" >&2
	exit 2
}

prefix="" source="" cuda="" gdrcopy_source="" jobs=$(nproc)
while [ $# -gt 0 ]; do
	case $1 in
	--cuda)
		cuda=/usr/local/cuda
		if [ $# -gt 1 ] && [ "${2#--}" = "$2" ]; then
			cuda=$2
			shift
		fi
		shift
		continue
		;;
	--prefix | --source | --gdrcopy-source | --jobs) [ $# -gt 1 ] || usage ;;
	*) usage ;;
	esac
	case $1 in
	--prefix) prefix=$2 ;;
	--source) source=$2 ;;
	--gdrcopy-source) gdrcopy_source=$2 ;;
	--jobs) jobs=$2 ;;
	esac
	shift 2
done
case $prefix in
/*) ;;
*)
	echo "--prefix has to be an absolute path" >&2
	usage
	;;
esac
if [ -n "$cuda" ] && [ ! -f "$cuda/include/cuda.h" ]; then
	echo "there is no CUDA toolkit in $cuda: $cuda/include/cuda.h is missing" >&2
	exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# check_out URL COMMIT REPOSITORY FOLDER: puts the commit's files into the folder. An empty REPOSITORY means the URL's.
check_out() {
	local url=$1 commit=$2 repository=$3 folder=$4
	if [ -z "$repository" ]; then
		repository=$work/git-$(basename "$folder")
		git init --quiet --bare "$repository"
		git -C "$repository" fetch --quiet --depth 1 "$url" "$commit"
	fi
	if ! git -c safe.directory='*' -C "$repository" cat-file -e "$commit^{commit}"; then
		echo "$repository has no commit $commit" >&2
		exit 1
	fi
	mkdir "$folder"
	git -c safe.directory='*' -C "$repository" archive "$commit" | tar -x -C "$folder"
}

options=(--without-cuda --without-gdrcopy)
if [ -n "$cuda" ]; then
	check_out "$gdrcopy_url" "$gdrcopy_commit" "$gdrcopy_source" "$work/gdrcopy"
	make -C "$work/gdrcopy" -j"$jobs" prefix="$prefix" CUDA="$cuda" lib lib_install
	# Without nvcc and GDA: they are for kernels that call UCX, and pdserve has none. GDA needs a submodule besides.
	options=(--with-cuda="$cuda" --with-gdrcopy="$prefix" --without-gda NVCC=/bin/false)
fi

check_out "$ucx_url" "$ucx_commit" "$source" "$work/ucx"
cd "$work/ucx"
# What autogen.sh does, without its submodule, which only GDA needs.
mkdir -p config/m4 config/aux
autoreconf --install
# As UCX's own contrib/configure-release has it, with the threads and the transports that pdserve takes. A transport that
# was asked for by name and has no headers here ends the build.
./configure --prefix="$prefix" --enable-mt --enable-cma --enable-numa \
	--disable-logging --disable-debug --disable-assertions --disable-params-check \
	--disable-static --disable-doxygen-doc --without-go --without-java \
	--with-verbs --with-rdmacm --with-mlx5 "${options[@]}"
make -j"$jobs"
# Into a folder of its own first: what lies in the prefix already may be others'.
make install-strip DESTDIR="$work/installed"
find "$work/installed" -name '*.la' -delete
mkdir -p "$prefix"
tar -C "$work/installed$prefix" -c . | tar -C "$prefix" -x --no-overwrite-dir

# A module that was left out is otherwise noticed by nobody before there is traffic.
wanted=(libuct_ib libuct_ib_mlx5 libuct_rdmacm)
[ -z "$cuda" ] || wanted+=(libuct_cuda libuct_cuda_gdrcopy)
for module in "${wanted[@]}"; do
	[ -e "$prefix/lib/ucx/$module.so" ] || {
		echo "UCX was built without $module: see its configure output above" >&2
		exit 1
	}
done
for library in libucs libucs_signal libuct libucp libucm; do
	[ -e "$prefix/lib/$library.so" ] || {
		echo "UCX was built without $library.so, which ucxx loads by this name" >&2
		exit 1
	}
done
"$prefix/bin/ucx_info" -v
