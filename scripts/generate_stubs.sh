#!/usr/bin/env bash
# Writes the stubs of proto/tocsin/v1 into OUT_DIR/tocsin/v1: *_pb2.py, *_pb2_grpc.py and their .pyi.
# Run through `make proto` or `make check-stubs`, which install the two tool environments first.
set -euo pipefail

out_dir=${1:?usage: generate_stubs.sh OUT_DIR}
root=$(cd "$(dirname "$0")/.." && pwd)
generator=$root/.tools/grpcio-tools/bin/python
plugins=$root/.tools/mypy-protobuf/bin

# google/rpc/status.proto is not part of protoc; it comes with googleapis-common-protos.
google_protos=$("$generator" -c 'import google.rpc, os; print(os.path.dirname(next(iter(google.rpc.__path__))))')/..

mkdir -p "$out_dir"
cd "$root"
"$generator" -m grpc_tools.protoc \
  -I proto -I "$google_protos" \
  --plugin=protoc-gen-mypy="$plugins/protoc-gen-mypy" \
  --plugin=protoc-gen-mypy_grpc="$plugins/protoc-gen-mypy_grpc" \
  --python_out="$out_dir" --grpc_python_out="$out_dir" \
  --mypy_out=quiet:"$out_dir" --mypy_grpc_out=quiet:"$out_dir" \
  proto/tocsin/v1/*.proto
