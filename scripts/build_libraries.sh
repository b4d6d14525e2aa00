#!/bin/sh
# Builds static libjpeg-turbo and libdeflate, with their licenses, in PREFIX; wheels' modules are linked with them:
#   scripts/build_libraries.sh PREFIX LIBJPEG_TURBO.tar.gz LIBDEFLATE.tar.gz
# It needs a C compiler and cmake; on x86_64, nasm. CC, AR, RANLIB and PROCESSOR build for another machine.
set -eu
prefix=$1 jpeg=$2 deflate=$3
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir -p "$prefix/lib" "$prefix/include" "$prefix/licenses" "$place/jpeg" "$place/deflate"

for archive in "$jpeg" "$deflate"; do
    wanted=$(grep " $(basename "$archive")\( \|\$\)" "$(dirname "$0")/libraries.txt" | cut -d' ' -f1)
    echo "${wanted:-unknown}  $archive" | shasum -a 256 -c - >/dev/null || {
        echo "$archive: its SHA-256 is not in scripts/libraries.txt" >&2
        exit 1
    }
done
tar -xzf "$jpeg" -C "$place/jpeg" --strip-components 1
tar -xzf "$deflate" -C "$place/deflate" --strip-components 1

set --
[ -z "${PROCESSOR:-}" ] || set -- -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR="$PROCESSOR" \
    -DCMAKE_AR="$AR" -DCMAKE_RANLIB="$RANLIB"
cmake -S "$place/jpeg" -B "$place/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" \
    -DCMAKE_INSTALL_LIBDIR="$prefix/lib" -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
    -DENABLE_SHARED=OFF -DWITH_TURBOJPEG=OFF -DREQUIRE_SIMD=ON -DCMAKE_POLICY_VERSION_MINIMUM=3.5 "$@"
cmake --build "$place/build" --parallel --target jpeg-static
cp "$place/build/libjpeg.a" "$prefix/lib/"
cp "$place/build/jconfig.h" "$place/jpeg/jmorecfg.h" "$place/jpeg/jpeglib.h" "$place/jpeg/jerror.h" "$prefix/include/"
cp "$place/jpeg/LICENSE.md" "$prefix/licenses/libjpeg-turbo.md"
cp "$place/jpeg/README.ijg" "$prefix/licenses/libjpeg-turbo-ijg.txt"

cd "$place/deflate" # its files compile without a build system
${CC:-cc} -O2 -fPIC -I. -c lib/*.c lib/*/*.c
${AR:-ar} rcs "$prefix/lib/libdeflate.a" ./*.o
cp libdeflate.h "$prefix/include/"
cp COPYING "$prefix/licenses/libdeflate.txt"
