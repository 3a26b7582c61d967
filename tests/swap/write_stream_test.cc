// A file is what was appended and overwritten, however that was cut, on whatever file; one that the drive
// refused cannot be finished.
#include "swap/write_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/inline_backend.h"
#include "swap/format.h"
#include "tests/swap/scratch_directory.h"

namespace penstock::swap::write_stream_test {
namespace {

using testing::HasSubstr;

// pwrite, until the writes that may pass are over.
class RefusingBackend final : public aio::InlineBackend {
 public:
  RefusingBackend(std::atomic<int>* left, int error) : left_(*left), error_(error) {}
  std::string_view name() const override { return "refusing"; }

 private:
  int64_t Transfer(aio::Piece& piece) override {
    return piece.op == aio::Op::kWrite && left_-- <= 0 ? -error_ : Whole(piece);
  }
  std::atomic<int>& left_;
  const int error_;
};

class WriteStreamTest : public testing::Test {
 protected:
  static constexpr uint64_t kChunk = 2 * kSectorBytes;

  void Make(size_t chunks, aio::EngineOptions options = {}) {
    stream_.reset();
    options.log = [](std::string_view) {};
    auto engine = aio::Engine::Create(std::move(options));
    ASSERT_TRUE(engine.ok()) << engine.status();
    aio::ArenaOptions arena_options;
    arena_options.lock = false;
    arena_options.bytes = chunks * kChunk;
    auto arena = aio::Arena::Create(arena_options);
    ASSERT_TRUE(arena.ok()) << arena.status();
    engine_ = *std::move(engine);
    arena_ = *std::move(arena);
    stream_ = std::make_unique<WriteStream>(*engine_, std::span(arena_->data(), chunks * kChunk), kChunk);
  }
  std::string Contents(const std::string& path) const {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string Random(size_t bytes) {
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }
  size_t Below(size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(random_); }
  absl::Status Append(const std::string& text) { return stream_->Append(std::as_bytes(std::span(text))); }
  absl::Status Overwrite(uint64_t offset, const std::string& text) {
    return stream_->Overwrite(offset, std::as_bytes(std::span(text)));
  }

  ScratchDirectory scratch_;
  std::mt19937 random_{7};
  std::unique_ptr<aio::Engine> engine_;
  std::unique_ptr<aio::Arena> arena_;
  std::unique_ptr<WriteStream> stream_;
};

TEST_F(WriteStreamTest, AFileIsWhatWasAppendedAndOverwritten) {
  for (const size_t chunks : {size_t{1}, size_t{2}, size_t{5}}) {
    Make(chunks);
    for (int round = 0; round < 60; ++round) {
      const std::string path = scratch_.Sub(absl::StrCat(chunks, "-", round));
      std::string expected;
      ASSERT_TRUE(stream_->Open(path, Below(2) == 0 ? 0 : 1 + Below(20 * kChunk)).ok());
      for (size_t pieces = Below(12); pieces > 0; --pieces) {
        // Often on the edge of a chunk.
        const size_t bytes = Below(3) == 0 ? kChunk - expected.size() % kChunk : Below(3 * kChunk);
        const std::string piece = Random(bytes);
        ASSERT_TRUE(Append(piece).ok());
        expected += piece;
        EXPECT_EQ(stream_->bytes(), expected.size());
        if (expected.empty() || Below(2) == 0) continue;
        const size_t at = Below(expected.size());
        const std::string other = Random(Below(std::min<size_t>(expected.size() - at, kChunk + 100) + 1));
        const absl::Status overwritten = Overwrite(at, other);
        ASSERT_TRUE(overwritten.ok()) << overwritten;
        expected.replace(at, other.size(), other);
      }
      if (Below(2) == 0) {
        ASSERT_TRUE(stream_->Flush().ok());
      }
      const absl::Status finished = stream_->Finish();
      ASSERT_TRUE(finished.ok()) << finished;
      ASSERT_EQ(Contents(path), expected) << "round " << round;
    }
  }
}

TEST_F(WriteStreamTest, TheModeIsTheProcesss) {
  Make(2);
  const mode_t before = ::umask(027);
  ASSERT_TRUE(stream_->Open(scratch_.Sub("file"), 10).ok());
  ::umask(before);
  ASSERT_TRUE(stream_->Finish().ok());
  struct stat info {};
  ASSERT_EQ(::stat(scratch_.Sub("file").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640U);
  EXPECT_EQ(info.st_size, 0);
}

// Of the writes of a file each in turn is the first that fails.
TEST_F(WriteStreamTest, WhatTheDriveRefusesIsNeverFinished) {
  std::atomic<int> left{0};
  for (const int error : {EIO, ENOSPC}) {
    aio::EngineOptions options;
    options.io_error_retries = 0;
    options.backend_factory = [&] { return std::make_unique<RefusingBackend>(&left, error); };
    Make(2, options);
    int refused = 0;
    for (int passing = 0; passing < 12; ++passing) {
      const std::string path = scratch_.Sub("file");
      left = passing;
      std::filesystem::remove(path);
      ASSERT_TRUE(stream_->Open(path, 7 * kChunk).ok());
      const std::string text = Random(6 * kChunk + 100);
      absl::Status status = Append(text);
      status.Update(Overwrite(10, "0123456789"));
      const absl::Status finished = stream_->Finish();
      if (finished.ok()) {
        ASSERT_TRUE(status.ok());
        std::string expected = text;
        EXPECT_EQ(Contents(path), expected.replace(10, 10, "0123456789"));
        continue;
      }
      ++refused;
      EXPECT_THAT(finished.message(), HasSubstr(path));
      EXPECT_EQ(stream_->Finish(), finished);  // it stays
      EXPECT_FALSE(Append("more").ok());
    }
    EXPECT_EQ(refused, 8);  // seven chunks and the one that is changed
    // Another file is another matter.
    left = 1000;
    std::filesystem::remove(scratch_.Sub("next"));
    ASSERT_TRUE(stream_->Open(scratch_.Sub("next"), 0).ok());
    ASSERT_TRUE(Append("whole").ok());
    ASSERT_TRUE(stream_->Finish().ok());
    EXPECT_EQ(Contents(scratch_.Sub("next")), "whole");
  }
}

TEST_F(WriteStreamTest, WhatCannotBeIsRefused) {
  Make(2);
  EXPECT_EQ(Append("x").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(stream_->Finish().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(stream_->Open(scratch_.Sub("no/file"), 0).message(), HasSubstr("no/file: open for writing"));
  EXPECT_EQ(stream_->Open(scratch_.Sub("file"), uint64_t{1} << 50).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Append("x").code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(stream_->Open(scratch_.Sub("file"), 0).ok());
  ASSERT_TRUE(Append("abc").ok());
  EXPECT_EQ(Overwrite(2, "de").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Overwrite(4, "").code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(stream_->Flush().ok());
  EXPECT_THAT(Append("d").message(), HasSubstr("its end has set out"));
  ASSERT_TRUE(stream_->Finish().ok());
  EXPECT_EQ(Contents(scratch_.Sub("file")), "abc");
  // What has the name stays, a link to it too.
  std::filesystem::create_symlink("file", scratch_.Sub("link"));
  for (const char* name : {"file", "link"})
    EXPECT_EQ(stream_->Open(scratch_.Sub(name), 0).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Contents(scratch_.Sub("file")), "abc");
  // One that is given up, with writes on their way.
  ASSERT_TRUE(stream_->Open(scratch_.Sub("other"), 0).ok());
  ASSERT_TRUE(Append(std::string(5 * kChunk, 'x')).ok());
  stream_.reset();
}

}  // namespace
}  // namespace penstock::swap::write_stream_test
