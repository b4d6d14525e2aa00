#!/bin/sh
# Builds a static libjpeg-turbo in PREFIX, which the wheels' module is linked with:
#   LIBJPEG_TURBO_SHA256=... native/build_libjpeg.sh PREFIX
# It needs a C compiler, curl and cmake; on x86-64, nasm makes it several times faster.
set -eu
prefix=$1
version=3.1.3
sha256=${LIBJPEG_TURBO_SHA256:?set it to the SHA-256 of libjpeg-turbo-$version.tar.gz}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

command -v yum >/dev/null && yum install -y cmake nasm
command -v brew >/dev/null && brew install cmake nasm
curl -fsSL -o "$place/source.tar.gz" \
    "https://github.com/libjpeg-turbo/libjpeg-turbo/releases/download/$version/libjpeg-turbo-$version.tar.gz"
echo "$sha256  $place/source.tar.gz" | shasum -a 256 -c -
mkdir "$place/source"
tar -xzf "$place/source.tar.gz" -C "$place/source" --strip-components 1
cmake -S "$place/source" -B "$place/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" \
    -DENABLE_SHARED=OFF -DWITH_TURBOJPEG=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
    -DREQUIRE_SIMD=ON
cmake --build "$place/build" --parallel --target install
