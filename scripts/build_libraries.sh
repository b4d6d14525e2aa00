#!/bin/sh
# Builds static libjpeg-turbo and libdeflate in PREFIX, which the wheels' module is linked with:
#   LIBJPEG_TURBO_SHA256=... LIBDEFLATE_SHA256=... scripts/build_libraries.sh PREFIX
# It needs a C compiler, curl and cmake; on x86-64, nasm makes libjpeg-turbo several times faster.
set -eu
prefix=$1
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

command -v yum >/dev/null && yum install -y cmake nasm
command -v brew >/dev/null && brew install cmake nasm

# build NAME URL SHA256 OPTIONS...
build() {
    name=$1 url=$2 sha256=$3
    shift 3
    curl -fsSL -o "$place/$name.tar.gz" "$url"
    echo "$sha256  $place/$name.tar.gz" | shasum -a 256 -c -
    mkdir "$place/$name"
    tar -xzf "$place/$name.tar.gz" -C "$place/$name" --strip-components 1
    cmake -S "$place/$name" -B "$place/$name/build" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_POSITION_INDEPENDENT_CODE=ON "$@"
    cmake --build "$place/$name/build" --parallel --target install
}

version=3.1.3
build libjpeg-turbo \
    "https://github.com/libjpeg-turbo/libjpeg-turbo/releases/download/$version/libjpeg-turbo-$version.tar.gz" \
    "${LIBJPEG_TURBO_SHA256:?set it to the SHA-256 of libjpeg-turbo-$version.tar.gz}" \
    -DENABLE_SHARED=OFF -DWITH_TURBOJPEG=OFF -DREQUIRE_SIMD=ON
version=1.24
build libdeflate \
    "https://github.com/ebiggers/libdeflate/releases/download/v$version/libdeflate-$version.tar.gz" \
    "${LIBDEFLATE_SHA256:?set it to the SHA-256 of libdeflate-$version.tar.gz}" \
    -DLIBDEFLATE_BUILD_SHARED_LIB=OFF -DLIBDEFLATE_BUILD_GZIP=OFF
