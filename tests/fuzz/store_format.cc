// The bytes of a store as pure functions: superblock, layout of tiles, commit records. Input: store_image.h.
#include "tests/fuzz/store_image.h"

namespace penstock::fuzz {
namespace {

void CheckSuperblock(const StoreImage& image) {
  const std::span<const std::byte> file(image.bytes);
  const auto length = swap::SuperblockBytesFromHeaders(file.first(2 * swap::kSectorBytes));
  (void)swap::DirectoryFromHeaders(file.first(2 * swap::kSectorBytes));
  const auto decoded = swap::DecodeSuperblock(file);
  if (!decoded.ok()) {
    Refused(decoded.status());
    return;
  }
  Accepted();
  FUZZ_CHECK(length.ok());
  FUZZ_CHECK(decoded->directory < decoded->shape.directories());
  FUZZ_CHECK(swap::Validate(decoded->shape).ok());
  const auto geometry = swap::Geometry::Make(decoded->shape);
  if (!geometry.ok()) {
    Refused(geometry.status());
    return;
  }
  FUZZ_CHECK(geometry->superblock_bytes() == *length);
  for (uint32_t t = 0; t < std::min(geometry->tiles(), 64u); ++t) {
    const uint64_t end = geometry->scratch_offset(t) + geometry->scratch_bytes(t);
    FUZZ_CHECK(end <= geometry->file_bytes(geometry->directory(t)));
    FUZZ_CHECK(geometry->slot_offset(t, 0) >= geometry->superblock_bytes());
  }
  // What was taken is what would be written.
  const auto again = swap::DecodeSuperblock(swap::EncodeSuperblock(decoded->shape, decoded->directory));
  FUZZ_CHECK(again.ok() && again->shape == decoded->shape && again->damage.empty());
}

void CheckRecords(const StoreImage& image) {
  const swap::Geometry& g = image.geometry;
  for (uint32_t place = 0; place < swap::kRecordPlaces; ++place) {
    for (uint32_t copy = 0; copy < swap::kRecordCopies; ++copy) {
      const auto bytes =
          std::span<const std::byte>(image.bytes).subspan(g.record_offset(place, copy), g.record_capacity());
      const auto record = swap::DecodeRecord(g, image.shape.uuid, place, bytes);
      if (!record.ok()) {
        Refused(record.status());
        continue;
      }
      Accepted();
      FUZZ_CHECK(record->sequence % swap::kRecordPlaces == place);
      FUZZ_CHECK(record->tiles.size() == g.tiles() && record->checksums.size() == g.total_segments());
      for (const swap::TileVersion& tile : record->tiles)
        FUZZ_CHECK(tile.slot < g.slots() && tile.version > 0);
      std::vector<std::byte> again(g.record_capacity());
      swap::EncodeRecord(g, image.shape.uuid, *record,
                         std::span(again).first(swap::RecordBytes(g, record->payload.size())));
      const auto same = swap::DecodeRecord(g, image.shape.uuid, place, again);
      FUZZ_CHECK(same.ok() && same->payload == record->payload && same->checksums == record->checksums);
    }
  }
}

}  // namespace
}  // namespace penstock::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  static const penstock::fuzz::StoreImage* const pristine =
      new penstock::fuzz::StoreImage(penstock::fuzz::MakeStoreImage());
  penstock::fuzz::StoreImage image = *pristine;
  penstock::fuzz::ApplyPatches(image, data, bytes);
  penstock::fuzz::CheckSuperblock(image);
  penstock::fuzz::CheckRecords(image);
  return 0;
}
