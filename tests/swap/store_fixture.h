// A store in a scratch directory on the real disk, with a model to fill it.
#ifndef PENSTOCK_TESTS_SWAP_STORE_FIXTURE_H_
#define PENSTOCK_TESTS_SWAP_STORE_FIXTURE_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <string_view>

#include "swap/store.h"
#include "swap/store_files.h"
#include "tests/swap/fake_model.h"
#include "tests/swap/scratch_directory.h"

namespace penstock::swap {

class StoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    aio::EngineOptions engine_options;
    engine_options.log = [](std::string_view) {};
    auto engine = aio::Engine::Create(engine_options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    options_.directories = {scratch_.Sub("run")};
    options_.lock_patience_ms = 50;
  }

  std::unique_ptr<Store> Create(const std::string& identity = "{}") {
    auto store = Store::Create(*engine_, options_, layout_, identity);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  std::unique_ptr<Store> Open() {
    auto store = Store::Open(*engine_, options_);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  // A store at step 0 that holds `model`.
  std::unique_ptr<Store> CreateCommitted(FakeModel* model) {
    auto store = Create();
    model->Initialize();
    EXPECT_TRUE(model->WriteAll(*store, 1).ok());
    const absl::Status committed = store->CommitNow({.step = 0, .updates = 0, .payload = "first"});
    EXPECT_TRUE(committed.ok()) << committed;
    return store;
  }
  void Step(Store& store, FakeModel* model, uint64_t step) {
    model->UpdateAll(step);
    ASSERT_TRUE(model->WriteAll(store, step + 1).ok());
    const absl::Status committed =
        store.CommitNow({.step = step, .updates = step, .payload = absl::StrCat("p", step)});
    ASSERT_TRUE(committed.ok()) << committed;
  }
  std::string File(int directory = 0) const { return StorePath(options_.directories[directory]); }
  void Flip(const std::string& path, uint64_t offset, uint8_t mask = 1) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    uint8_t byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    byte ^= mask;
    ASSERT_EQ(::pwrite(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    ASSERT_EQ(::fsync(fd), 0);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }

  ScratchDirectory scratch_;
  std::unique_ptr<aio::Engine> engine_;
  StoreOptions options_;
  Layout layout_ = SmallLayout();
};

}  // namespace penstock::swap

#endif  // PENSTOCK_TESTS_SWAP_STORE_FIXTURE_H_
