#include "tests/kernels/fibers/fibers.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// The compiler's stores into __shared__ variables, between these; there may be none.
extern "C" {
extern char __start_penstock_shared[] __attribute__((weak));
extern char __stop_penstock_shared[] __attribute__((weak));
}

// Saves what a call keeps on this stack, leaves the stack pointer at *from, and goes on with another's.
#ifdef __x86_64__
extern "C" void penstock_fiber_switch(void** from, void* to);
asm(R"(
.text
.globl penstock_fiber_switch
.type penstock_fiber_switch, @function
penstock_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size penstock_fiber_switch, .-penstock_fiber_switch
)");
#endif

penstock::fibers::Index threadIdx, blockIdx, blockDim, gridDim;

namespace penstock::fibers {

namespace {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kStack = size_t{256} << 10, kPage = 4096;
constexpr size_t kArena = size_t{256} << 20, kAlign = 256;
constexpr size_t kMostParameters = 4096;

// Who touched a byte last, and when. Threads of a launch are numbered from kFirstThread.
struct Cell {
  uint32_t writer, written_at, reader, read_at;
};
constexpr uint32_t kNobody = 0, kUnwritten = 1, kHost = 2, kFirstThread = 8;  // kNobody: of no allocation
// Several readers that nothing has put in order: of a warp, of a block, of several blocks.
constexpr uint32_t kOfWarp = 0x80000000u, kOfBlock = 0xC0000000u, kOfGrid = 0xFFFFFFFFu;

// Whether a thread of a kernel runs. Code that kernels share with the rest (templates) is watched there too.
constinit bool running = false;

enum class Waiting : uint8_t { kNo, kBarrier, kShuffle, kSyncWarp, kOver };

struct Fiber {
  void* stack_pointer;
  ucontext_t context;
  Waiting waiting;
  Site site;
  unsigned mask, source;
  uint64_t value;
  uint32_t came_at;
  std::array<uint32_t, kWarp> known;  // what each lane did before that is before what this one does
};

class Device {
 public:
  Device() {
    arena_ = static_cast<char*>(Map(kArena));
    cells_ = static_cast<Cell*>(Map(kArena * sizeof(Cell)));
    stacks_ = static_cast<char*>(Map(kMostThreads * kStack));
    for (unsigned i = 0; i < kMostThreads; ++i) mprotect(stacks_ + i * kStack, kPage, PROT_NONE);
    fibers_.resize(kMostThreads);
    shared_ = __start_penstock_shared;
    shared_bytes_ = static_cast<size_t>(__stop_penstock_shared - __start_penstock_shared);
    shared_cells_.resize(shared_bytes_);
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(arena_, kArena);
#endif
  }

  bool Run(unsigned blocks, unsigned threads, size_t parameter_bytes, Body body, void* context) {
    if (blocks == 0 || threads == 0 || threads > kMostThreads || parameter_bytes > kMostParameters ||
        uint64_t{blocks} * threads >= kOfWarp - kFirstThread) {
      report_ = "a launch of " + std::to_string(blocks) + " blocks of " + std::to_string(threads) +
                " threads with " + std::to_string(parameter_bytes) + " bytes of parameters";
      return false;
    }
    body_ = body;
    context_ = context;
    failed_ = false;
    threads_ = threads;
    launched_at_ = ++now_;
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    for (const unsigned block : order) {
      if (failed_) break;
      RunBlock(block);
    }
    if (now_ > uint32_t{1} << 31) std::abort();  // the clock of the accesses is nearly over
    return !failed_;
  }

  void Wait(Waiting what, unsigned mask, unsigned source, uint64_t value, Site site) {
    Fiber& self = fibers_[current_];
    self.waiting = what;
    self.site = site;
    self.mask = mask;
    self.source = source;
    self.value = value;
    self.came_at = ++now_;
    if (what == Waiting::kBarrier) {
      if (++at_barrier_ == 1) {
        barrier_site_ = site;
      } else if (!Same(barrier_site_, site)) {
        Fail("threads of a block at two barriers at once: " + Where(current_) + ", others at " +
             Text(barrier_site_));
      }
      if (at_barrier_ == threads_) ReleaseBlock();
    } else {
      const unsigned lane = current_ % kWarp;
      if ((mask >> lane & 1) == 0) Fail("a mask that does not name its lane: " + Where(current_));
      if (what == Waiting::kShuffle && (mask >> source % kWarp & 1) == 0)
        Fail("a shuffle from lane " + std::to_string(source) +
             ", which its mask does not name: " + Where(current_));
      if (WarpIsThere(self)) ReleaseWarp(self);
    }
    Next();
  }

  uint64_t shuffled() const { return fibers_[current_].value; }

  [[gnu::always_inline]] void Access(const void* p, size_t bytes, bool write) {
    const auto at = reinterpret_cast<uintptr_t>(p);
    Cell* cell;
    if (at - reinterpret_cast<uintptr_t>(arena_) < kArena) {
      cell = cells_ + (at - reinterpret_cast<uintptr_t>(arena_));
    } else if (at - reinterpret_cast<uintptr_t>(shared_) < shared_bytes_) {
      cell = &shared_cells_[at - reinterpret_cast<uintptr_t>(shared_)];
      bytes = std::min(bytes, shared_bytes_ - (at - reinterpret_cast<uintptr_t>(shared_)));
    } else {
      return;  // of the thread itself, or a constant
    }
    const uint32_t me = kFirstThread + blockIdx.x * threads_ + current_;
    for (size_t i = 0; i < bytes; ++i, ++cell) {
      if (cell->writer <= kUnwritten && (cell->writer == kNobody || !write)) [[unlikely]]
        return FailAccess(
            static_cast<const char*>(p) + i, write,
            cell->writer == kNobody ? "outside of every allocation" : "that nobody has written");
      if (cell->writer != me && cell->writer >= kFirstThread && !Before(cell->writer, cell->written_at))
          [[unlikely]] {
        return FailAccess(static_cast<const char*>(p) + i, write,
                          "that " + Name(cell->writer) + " writes, in no order");
      }
      const bool others_read =
          cell->reader != 0 && cell->reader != me && !Before(cell->reader, cell->read_at);
      if (write) {
        if (others_read) [[unlikely]]
          return FailAccess(static_cast<const char*>(p) + i, write,
                            "that " + Name(cell->reader) + " reads, in no order");
        cell->writer = me;
        cell->written_at = now_;
      } else {
        cell->reader = others_read ? Several(cell->reader, me) : me;
        cell->read_at = now_;
      }
    }
  }
  void FailMisaligned(const void* p, const char* file, unsigned line) {
    if (running)
      Fail("a misaligned access: " + Text({file, line}) + ", address " +
           std::to_string(reinterpret_cast<uintptr_t>(p) % 64) + " modulo 64");
  }

  void* Allocate(size_t bytes) {
    if (sizes_.empty()) used_ = kPage;  // nothing is there: from the start again
    const size_t rounded = (std::max<size_t>(bytes, 1) + 2 * kAlign - 1) / kAlign * kAlign;
    if (rounded > kArena - kPage - used_) return nullptr;
    char* const memory = arena_ + used_;
    used_ += rounded;
    sizes_[memory] = bytes;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(memory, bytes);
#endif
    Mark(memory, bytes, kUnwritten);
    std::memset(memory, 0xFF, bytes);  // numbers that show
    return memory;
  }
  bool Free(void* memory) {
    if (memory == nullptr) return true;
    const auto found = sizes_.find(static_cast<char*>(memory));
    if (found == sizes_.end()) return false;
    Mark(found->first, found->second, kNobody);
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(memory, found->second);
#endif
    sizes_.erase(found);
    return true;
  }
  bool Owns(const void* memory, size_t bytes) const {
    auto found = sizes_.upper_bound(static_cast<char*>(const_cast<void*>(memory)));
    if (found == sizes_.begin()) return false;
    --found;
    const auto offset = static_cast<size_t>(static_cast<const char*>(memory) - found->first);
    return offset <= found->second && bytes <= found->second - offset;
  }
  void Mark(void* memory, size_t bytes, uint32_t writer) {
    Cell* const cell = cells_ + (static_cast<char*>(memory) - arena_);
    std::fill(cell, cell + bytes, Cell{writer, 0, 0, 0});
  }

  void SetSeed(uint64_t seed) { random_.seed(seed); }
  std::string TakeReport() { return std::exchange(report_, {}); }

 private:
  static void* Map(size_t bytes) {
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return memory;
  }

  static bool Same(const Site& a, const Site& b) {
    return a.line == b.line && std::strcmp(a.file, b.file) == 0;
  }
  static std::string Text(const Site& site) {
    const char* const slash = std::strrchr(site.file, '/');
    return std::string(slash == nullptr ? site.file : slash + 1) + ":" + std::to_string(site.line);
  }
  std::string Where(unsigned thread) const {
    const Fiber& fiber = fibers_[thread];
    const std::string name = "thread " + std::to_string(thread);
    if (fiber.waiting == Waiting::kOver) return name + " has ended";
    const char* const what = fiber.waiting == Waiting::kBarrier   ? " is at the barrier "
                             : fiber.waiting == Waiting::kShuffle ? " is at the shuffle "
                                                                  : " is at the __syncwarp ";
    return name + what + Text(fiber.site);
  }
  std::string Name(uint32_t who) const {
    if (who == kHost) return "the host";
    if (who >= kOfWarp) return "several threads";
    const uint32_t thread = who - kFirstThread;
    return "thread " + std::to_string(thread % threads_) + " of block " + std::to_string(thread / threads_);
  }

  // Whether all that `who` did until `then` is before what the current thread does now.
  bool Before(uint32_t who, uint32_t then) const {
    if (then < launched_at_) return true;
    if (who == kOfGrid) return false;
    uint32_t block, warp, lane = kWarp;  // kWarp: any
    if (who >= kOfBlock) {
      return who - kOfBlock == blockIdx.x && then < barrier_at_;
    }
    if (who >= kOfWarp) {
      block = (who - kOfWarp) / WarpsPerBlock();
      warp = (who - kOfWarp) % WarpsPerBlock();
    } else {
      const uint32_t thread = (who - kFirstThread) % threads_;
      block = (who - kFirstThread) / threads_;
      warp = thread / kWarp;
      lane = thread % kWarp;
    }
    if (block != blockIdx.x) return false;
    if (then < barrier_at_) return true;
    if (warp != current_ / kWarp) return false;
    const auto& known = fibers_[current_].known;
    if (lane != kWarp) return then < known[lane];
    for (uint32_t l = 0; l < kWarp; ++l) {
      if (l != current_ % kWarp && then >= known[l]) return false;
    }
    return true;
  }
  uint32_t WarpsPerBlock() const { return (threads_ + kWarp - 1) / kWarp; }
  uint32_t Several(uint32_t reader, uint32_t me) const {
    const uint32_t own_block = blockIdx.x, own_warp = own_block * WarpsPerBlock() + current_ / kWarp;
    if (reader == kOfGrid) return kOfGrid;
    if (reader >= kOfBlock) return reader - kOfBlock == own_block ? reader : kOfGrid;
    uint32_t warp;
    if (reader >= kOfWarp) {
      warp = reader - kOfWarp;
    } else {
      const uint32_t thread = reader - kFirstThread;
      warp = thread / threads_ * WarpsPerBlock() + thread % threads_ / kWarp;
    }
    (void)me;
    if (warp == own_warp) return kOfWarp + own_warp;
    return warp / WarpsPerBlock() == own_block ? kOfBlock + own_block : kOfGrid;
  }

  // The lanes that the mask names are all there, for the same.
  bool WarpIsThere(const Fiber& self) {
    const unsigned first = current_ / kWarp * kWarp;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((self.mask >> lane & 1) == 0) continue;
      const unsigned thread = first + lane;
      if (thread >= threads_ || fibers_[thread].waiting == Waiting::kOver) {
        Fail("a mask names lane " + std::to_string(lane) + ", which does not come: " + Where(current_));
      }
      const Fiber& other = fibers_[thread];
      if (other.waiting != self.waiting || other.mask != self.mask || !Same(other.site, self.site))
        return false;
    }
    return true;
  }
  void ReleaseWarp(const Fiber& self) {
    const unsigned first = current_ / kWarp * kWarp, mask = self.mask;
    std::array<uint32_t, kWarp> joined{};
    std::array<uint64_t, kWarp> values;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      const Fiber& fiber = fibers_[first + lane];
      values[lane] = fiber.value;
      for (unsigned l = 0; l < kWarp; ++l) joined[l] = std::max(joined[l], fiber.known[l]);
      joined[lane] = std::max(joined[lane], fiber.came_at);
    }
    const bool orders_memory = self.waiting == Waiting::kSyncWarp;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      Fiber& fiber = fibers_[first + lane];
      if (orders_memory) {
        fiber.known = joined;
      } else {
        fiber.value = values[fiber.source % kWarp];
      }
      fiber.waiting = Waiting::kNo;
      ready_.push_back(first + lane);
    }
  }
  void ReleaseBlock() {
    at_barrier_ = 0;
    barrier_at_ = ++now_;
    for (unsigned i = 0; i < threads_; ++i) {
      fibers_[i].waiting = Waiting::kNo;
      ready_.push_back(i);
    }
  }

  void RunBlock(unsigned block) {
    blockIdx = {block, 0, 0};
    if (shared_bytes_ != 0) std::memset(shared_, 0xFF, shared_bytes_);
    std::fill(shared_cells_.begin(), shared_cells_.end(), Cell{kUnwritten, 0, 0, 0});
    ready_.clear();
    at_barrier_ = 0;
    over_ = 0;
    barrier_at_ = launched_at_;
    for (unsigned i = 0; i < threads_; ++i) {
      fibers_[i].waiting = Waiting::kNo;
      fibers_[i].known.fill(0);
      Prepare(i);
      ready_.push_back(i);
    }
    running = true;
    current_ = kMostThreads;
    Next();
    running = false;
  }

  // The next one that can go on; back to whoever launched where all are over, or none can.
  void Next() {
    if (ready_.empty()) {
      if (over_ < threads_) {
        for (unsigned i = 0; i < threads_; ++i) {
          if (fibers_[i].waiting != Waiting::kOver) Fail(Stuck(i));
        }
      }
      return SwitchTo(kMostThreads);
    }
    const size_t pick = random_() % ready_.size();
    const unsigned next = ready_[pick];
    ready_[pick] = ready_.back();
    ready_.pop_back();
    ++now_;
    SwitchTo(next);
  }
  std::string Stuck(unsigned thread) const {
    const Fiber& self = fibers_[thread];
    for (unsigned i = 0; i < threads_; ++i) {
      const Fiber& other = fibers_[i];
      if (self.waiting != Waiting::kBarrier &&
          (i / kWarp != thread / kWarp || (self.mask >> i % kWarp & 1) == 0))
        continue;
      if (other.waiting != self.waiting || !Same(other.site, self.site) || other.mask != self.mask)
        return Where(thread) + ", and waits for ever: " + Where(i);
    }
    return Where(thread) + ", and waits for ever";
  }

  [[noreturn]] void Fail(const std::string& what) {
    report_ = what + " (block " + std::to_string(blockIdx.x) + ")";
    failed_ = true;
    running = false;
    SwitchTo(kMostThreads);  // nobody goes on with this one
    std::abort();
  }
  [[gnu::noinline]] void FailAccess(const char* p, bool write, const std::string& why) {
    std::string place = "shared memory";
    if (p - arena_ >= 0 && static_cast<size_t>(p - arena_) < kArena) {
      auto found = sizes_.upper_bound(const_cast<char*>(p));
      if (found == sizes_.begin()) {
        place = "device memory";
      } else {
        --found;
        place = "byte " + std::to_string(p - found->first) + " of an allocation of " +
                std::to_string(found->second) + " bytes";
      }
    }
    Fail("thread " + std::to_string(current_) + (write ? " writes " : " reads ") + place + " " + why);
  }

  void Prepare(unsigned thread) {
    char* const low = stacks_ + thread * kStack + kPage;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(low, kStack - kPage);  // whoever had it may not have returned
#endif
#ifdef __x86_64__
    // Six registers and the address to return to, as if it had been called; the stack is aligned as at a
    // call.
    auto** top = reinterpret_cast<void**>(low + kStack - kPage - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&Device::Enter);
    top -= 6;
    std::fill(top, top + 6, nullptr);
    fibers_[thread].stack_pointer = top;
#else
    getcontext(&fibers_[thread].context);
    fibers_[thread].context.uc_stack.ss_sp = low;
    fibers_[thread].context.uc_stack.ss_size = kStack - kPage;
    makecontext(&fibers_[thread].context, &Device::Enter, 0);
#endif
  }
  static void Enter();
  [[noreturn]] void Live() {
    Arrived();
    body_(context_);
    fibers_[current_].waiting = Waiting::kOver;
    ++over_;
    Next();
    std::abort();
  }

  void SwitchTo(unsigned next) {
    const unsigned from = current_;
    current_ = next;
    if (next != kMostThreads) threadIdx = {next, 0, 0};
    if (from == next) return;
    Fiber& leaves = from == kMostThreads ? main_ : fibers_[from];
    Fiber& comes = next == kMostThreads ? main_ : fibers_[next];
#ifdef __SANITIZE_ADDRESS__
    const bool for_good = from != kMostThreads && (failed_ || leaves.waiting == Waiting::kOver);
    void* kept = nullptr;
    const void* const bottom = next == kMostThreads ? main_bottom_ : stacks_ + next * kStack + kPage;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &kept, bottom,
                                   next == kMostThreads ? main_bytes_ : kStack - kPage);
#endif
#ifdef __x86_64__
    penstock_fiber_switch(&leaves.stack_pointer, comes.stack_pointer);
#else
    swapcontext(&leaves.context, &comes.context);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
#endif
  }
  void Arrived() {
#ifdef __SANITIZE_ADDRESS__
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (!main_known_) {  // the first fiber of all comes from the program's own stack
      main_known_ = true;
      main_bottom_ = bottom;
      main_bytes_ = bytes;
    }
#endif
  }

  char *arena_, *stacks_, *shared_;
  Cell* cells_;
  size_t shared_bytes_, used_ = 0;
  std::vector<Cell> shared_cells_;
  std::map<char*, size_t> sizes_;
  std::mt19937_64 random_;
  std::string report_;

  Body body_ = nullptr;
  void* context_ = nullptr;
  Fiber main_{};
  std::vector<Fiber> fibers_;
  std::vector<unsigned> ready_;
  unsigned threads_ = 0, current_ = kMostThreads, at_barrier_ = 0, over_ = 0;
  Site barrier_site_{};
  uint32_t now_ = 0, launched_at_ = 0, barrier_at_ = 0;
  bool failed_ = false;
#ifdef __SANITIZE_ADDRESS__
  const void* main_bottom_ = nullptr;
  size_t main_bytes_ = 0;
  bool main_known_ = false;
#endif
};

Device& TheDevice() {
  static auto* const device = new Device;
  return *device;
}
Device* const device = &TheDevice();

void Device::Enter() { device->Live(); }

// A schedule for each repetition of the tests.
class Schedules : public ::testing::EmptyTestEventListener {
  void OnTestIterationStart(const ::testing::UnitTest&, int iteration) override {
    const char* const first = std::getenv("PENSTOCK_FIBERS_SEED");
    seed_ = (first == nullptr ? 1 : std::strtoull(first, nullptr, 10)) + static_cast<uint64_t>(iteration);
  }
  // Each test has it from its start, so that one alone fails as all do.
  void OnTestStart(const ::testing::TestInfo&) override {
    SetSeed(seed_);
    (void)TakeReport();
  }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    const std::string report = TakeReport();
    std::printf("schedule: PENSTOCK_FIBERS_SEED=%" PRIu64 "%s%s\n", seed_, report.empty() ? "" : "; ",
                report.c_str());
  }
  uint64_t seed_ = 1;
};
[[maybe_unused]] const bool listening = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Schedules);
  return true;
}();

}  // namespace

void SetSeed(uint64_t seed) { device->SetSeed(seed); }
std::string TakeReport() { return device->TakeReport(); }
bool WatchesMemory() {
#ifdef PENSTOCK_FIBERS_WATCH
  return true;
#else
  return false;
#endif
}

void Barrier(Site site) { device->Wait(Waiting::kBarrier, 0, 0, 0, site); }
void SyncWarp(unsigned mask, Site site) { device->Wait(Waiting::kSyncWarp, mask, 0, 0, site); }
uint64_t Shuffle(unsigned mask, uint64_t value, unsigned source, Site site) {
  device->Wait(Waiting::kShuffle, mask, source, value, site);
  return device->shuffled();
}
bool RunThreads(unsigned blocks, unsigned threads, size_t parameter_bytes, Body body, void* context) {
  return device->Run(blocks, threads, parameter_bytes, body, context);
}
void* Allocate(size_t bytes) { return device->Allocate(bytes); }
bool Free(void* memory) { return device->Free(memory); }
bool Owns(const void* memory, size_t bytes) { return device->Owns(memory, bytes); }
void NoteWritten(void* memory, size_t bytes) { device->Mark(memory, bytes, kHost); }

}  // namespace penstock::fibers

#ifdef __SANITIZE_ADDRESS__
// The threads of a launch that failed are left as they are, with the report that they were making.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
#endif

#ifdef PENSTOCK_FIBERS_WATCH
// What the compiler inserts before every access.
using penstock::fibers::device;
using penstock::fibers::running;
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define PENSTOCK_ACCESS(bytes)                    \
  void __tsan_read##bytes(void* p) {              \
    if (running) device->Access(p, bytes, false); \
  }                                               \
  void __tsan_write##bytes(void* p) {             \
    if (running) device->Access(p, bytes, true);  \
  }                                               \
  void __tsan_unaligned_read##bytes(void* p) {    \
    if (running) device->Access(p, bytes, false); \
  }                                               \
  void __tsan_unaligned_write##bytes(void* p) {   \
    if (running) device->Access(p, bytes, true);  \
  }
PENSTOCK_ACCESS(1)
PENSTOCK_ACCESS(2)
PENSTOCK_ACCESS(4)
PENSTOCK_ACCESS(8)
PENSTOCK_ACCESS(16)
#undef PENSTOCK_ACCESS
void __tsan_read_range(void* p, size_t bytes) {
  if (running) device->Access(p, bytes, false);
}
void __tsan_write_range(void* p, size_t bytes) {
  if (running) device->Access(p, bytes, true);
}

// The head of what the alignment check hands over.
struct PenstockMismatch {
  const char* file;
  uint32_t line, column;
};
void __ubsan_handle_type_mismatch_v1(const PenstockMismatch* where, const void* p) {
  device->FailMisaligned(p, where->file, where->line);
}
}
#endif
