// A small valid store as bytes, and changes to it: what the fuzz targets of the store's format start from.
//
// An input says how to change the image, so that a few bytes reach any field of 40 KiB:
//   byte 0       flags: kSealSuperblock, kSealRecords
//   then again and again: 3 bytes offset (little-endian), 1 byte n, n bytes that replace what stands there
// Random changes would never get past a checksum. Where a flag asks for it the checksums are made right again
// afterwards (FORMAT.md says how; their seeds are public), as someone would who means harm.
#ifndef PENSTOCK_TESTS_FUZZ_STORE_IMAGE_H_
#define PENSTOCK_TESTS_FUZZ_STORE_IMAGE_H_

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/checksum.h"
#include "swap/format.h"
#include "tests/fuzz/fuzz.h"

namespace penstock::fuzz {

inline constexpr uint8_t kSealSuperblock = 1;
inline constexpr uint8_t kSealRecords = 2;

struct StoreImage {
  swap::StoreShape shape;
  swap::Geometry geometry;
  std::vector<std::byte> bytes;  // the whole file of directory 0
};

// Two tiles, two slots, commits 4 and 5.
inline StoreImage MakeStoreImage() {
  swap::StoreShape shape;
  for (size_t i = 0; i < shape.uuid.size(); ++i) shape.uuid[i] = static_cast<uint8_t>(0x10 + i);
  shape.payload_capacity = 300;
  shape.identity = R"({"model":"gpt-tiny"})";
  shape.directory_paths = {"/nvme0/run"};
  shape.tiles = {{0, {{100, 5000}, 0}}, {0, {{4096}, 1}}};
  auto geometry = swap::Geometry::Make(shape);
  FUZZ_CHECK(geometry.ok());
  StoreImage image{shape, *geometry, swap::EncodeSuperblock(shape, 0)};
  const swap::Geometry& g = image.geometry;
  image.bytes.resize(g.file_bytes(0));
  for (uint64_t sequence : {4, 5}) {
    swap::Record record;
    record.sequence = sequence;
    record.step = sequence - 1;
    record.updates = sequence - 1;
    record.payload = R"({"loss":2.5})";
    for (uint32_t t = 0; t < g.tiles(); ++t) {
      const swap::TileVersion tile{sequence, static_cast<uint32_t>(sequence % 2)};
      record.tiles.push_back(tile);
      for (uint32_t s = 0; s < g.segments(t); ++s) {
        const std::span<std::byte> data =
            std::span(image.bytes).subspan(g.segment_offset(t, tile.slot, s), g.segment_bytes(t, s));
        std::fill(data.begin(), data.end(), static_cast<std::byte>(16 * t + s + sequence));
        record.checksums.push_back(swap::SegmentChecksum(shape.uuid, t, s, tile.version, data));
      }
    }
    for (uint32_t copy = 0; copy < swap::kRecordCopies; ++copy) {
      const auto place = static_cast<uint32_t>(sequence % swap::kRecordPlaces);
      swap::EncodeRecord(
          g, shape.uuid, record,
          std::span(image.bytes)
              .subspan(g.record_offset(place, copy), swap::RecordBytes(g, record.payload.size())));
    }
  }
  return image;
}

inline uint64_t Load64(const std::byte* at) {
  uint64_t value = 0;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
inline void Store64(std::byte* at, uint64_t value) { std::memcpy(at, &value, sizeof(value)); }

// Both copies of header and body, wherever the header says that the body is.
inline void SealSuperblock(std::span<std::byte> file) {
  constexpr uint64_t kSector = swap::kSectorBytes;
  if (file.size() < 2 * kSector) return;
  for (uint64_t header = 0; header < 2 * kSector; header += kSector) {
    std::byte* const at = file.data() + header;
    const uint64_t seed = kernels::Checksum(at + 16, 16, 0);
    const uint64_t body_bytes = Load64(at + 56);
    if (body_bytes <= file.size() - 2 * kSector)
      Store64(at + 64, kernels::Checksum(file.data() + 2 * kSector, body_bytes, seed));
    Store64(at + kSector - 8, kernels::Checksum(at, kSector - 8, seed));
  }
}

// One copy of a record.
inline void SealRecord(std::span<std::byte> record) {
  constexpr uint64_t kSector = swap::kSectorBytes;
  if (record.size() < kSector) return;
  std::byte* const at = record.data();
  std::byte key[24];
  std::memcpy(key, at + 16, 24);  // uuid and sequence stand side by side
  const uint64_t seed = kernels::Checksum(key, sizeof(key), 0);
  const uint64_t body_bytes = Load64(at + 56);
  if (body_bytes <= record.size() - kSector)
    Store64(at + 80, kernels::Checksum(at + kSector, body_bytes, seed));
  Store64(at + kSector - 8, kernels::Checksum(at, kSector - 8, seed));
}

// Changes the image as the input says.
inline void ApplyPatches(StoreImage& image, const uint8_t* data, size_t bytes) {
  const uint8_t flags = bytes == 0 ? 0 : data[0];
  for (size_t i = 1; i + 4 <= bytes;) {
    const size_t offset = data[i] + 256u * data[i + 1] + 65536u * data[i + 2];
    const size_t n = std::min<size_t>(data[i + 3], bytes - i - 4);
    for (size_t k = 0; k < n && offset + k < image.bytes.size(); ++k)
      image.bytes[offset + k] = static_cast<std::byte>(data[i + 4 + k]);
    i += 4 + n;
  }
  if ((flags & kSealSuperblock) != 0) SealSuperblock(image.bytes);
  if ((flags & kSealRecords) == 0) return;
  for (uint32_t place = 0; place < swap::kRecordPlaces; ++place) {
    for (uint32_t copy = 0; copy < swap::kRecordCopies; ++copy) {
      SealRecord(std::span(image.bytes)
                     .subspan(image.geometry.record_offset(place, copy), image.geometry.record_capacity()));
    }
  }
}

}  // namespace penstock::fuzz

#endif  // PENSTOCK_TESTS_FUZZ_STORE_IMAGE_H_
