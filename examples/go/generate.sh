#!/usr/bin/env bash
# Generates pagodapb/ from the .proto files, with protoc and its plugins protoc-gen-go and protoc-gen-go-grpc.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

module=example.com/stream
options=module=$module
for proto in pagoda/v1/inference.proto pagoda/v1/sampling.proto; do
  options+=,M$proto=$module/pagodapb
done
protoc --proto_path=../../protos --go_out="$options:." --go-grpc_out="$options:." pagoda/v1/{inference,sampling}.proto
# Only what lies in the module can be embedded in the program.
cp ../../protos/pagoda/v1/service_config.json pagodapb/
