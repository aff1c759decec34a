"""Writes the descriptors of all protos to a file, against which later ones are compared."""

import importlib
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

found = FileDescriptorSet()
for path in sorted(Path("proto/tocsin/v1").glob("*.proto")):
    module = importlib.import_module(f"tocsin.v1.{path.stem}_pb2")
    module.DESCRIPTOR.CopyToProto(found.file.add())
Path(sys.argv[1]).write_bytes(found.SerializeToString(deterministic=True))
