// The I/O engine for Python: files, transfers and locked memory, by address. What Python calls a buffer is
// known here as an address and an object that keeps it alive.
//
// The rules of this file. No thread of the engine ever touches a Python object or wants the GIL. Whatever may
// wait does so without the GIL, and in slices where a signal must get through (Transfer::Wait). A forked
// child has the memory of the engine and not its threads: there every object is left alone, its memory leaked
// on purpose.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "aio/arena.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "errors.h"
#include "gil.h"
#include "owned.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

void CheckAddress(uint64_t address, uint64_t bytes) {
  if (bytes != 0 && address == 0) throw nb::value_error("the buffer has no memory (address 0)");
}

class PyFile {
 public:
  PyFile(const std::string& path, bool write, bool create, bool truncate, bool nameless, bool direct,
         uint64_t size, int descriptor) {
    aio::FileOptions options;
    options.path = path;
    options.descriptor = descriptor;
    options.create = create;
    options.truncate = truncate;
    options.nameless = nameless;
    options.read_only = !write;
    options.direct = direct;
    options.size = size;
    options.allow_unaligned_file_system = true;
    absl::StatusOr<std::unique_ptr<aio::File>> opened;
    {
      const GilReleased released;
      opened = aio::File::Open(options);
    }
    file_ = MakeOwned(ValueOrRaise(std::move(opened), {.path = path}));
  }

  const std::shared_ptr<Owned<aio::File>>& owned() const { return file_; }
  aio::File& file() const { return file_->get(); }

  uint64_t Size() const { return ValueOrRaise(file().Size(), {.path = file().path()}); }
  void Resize(uint64_t bytes) { RaiseUnlessOk(file().Resize(bytes), {.path = file().path()}); }
  void Preallocate(uint64_t bytes) {
    absl::Status status;
    {
      const GilReleased released;
      status = file().Preallocate(bytes);
    }
    RaiseUnlessOk(status, {.path = file().path()});
  }
  void Sync() {
    absl::Status status;
    {
      const GilReleased released;
      status = file().SyncData();
    }
    RaiseUnlessOk(status, {.path = file().path()});
  }
  // The same for two opens of one file.
  nb::tuple Identity() const {
    struct stat info {};
    if (fstat(file().fd(), &info) != 0) Raise(absl::ErrnoToStatus(errno, "fstat"), {.path = file().path()});
    return nb::make_tuple(static_cast<uint64_t>(info.st_dev), static_cast<uint64_t>(info.st_ino));
  }

 private:
  std::shared_ptr<Owned<aio::File>> file_;
};

// Lines of the engine, kept until Python asks for them: no thread of the engine may call Python.
struct LogLines {
  std::mutex mutex;
  std::vector<std::string> lines;
};

class Transfer {
 public:
  Transfer(std::shared_ptr<Owned<aio::Engine>> engine, std::shared_ptr<Owned<aio::File>> file,
           nb::object keep)
      : engine_(std::move(engine)), file_(std::move(file)), keep_(std::move(keep)) {}
  ~Transfer() {
    if (engine_->here() && request_.pending()) {
      const GilReleased released;
      engine_->get().Cancel(&request_);
      (void)engine_->get().Wait(&request_);
    }
  }

  void Start(aio::Op op, uint64_t offset, uint64_t address, uint64_t bytes) {
    void* const data = reinterpret_cast<void*>(address);
    place_ = {.path = file_->get().path(), .transfer = true, .offset = offset, .length = bytes};
    if (op == aio::Op::kRead) {
      request_.PrepareRead(file_->get(), offset, data, bytes);
    } else if (op == aio::Op::kWrite) {
      request_.PrepareWrite(file_->get(), offset, data, bytes);
    } else {
      request_.PrepareSync(file_->get());
    }
    absl::Status status;
    {
      const GilReleased released;
      status = engine_->get().Submit(&request_);
    }
    RaiseUnlessOk(status, place_);
  }

  bool Done() const { return request_.finished(); }

  // True once it has ended, however it did.
  bool Wait(int64_t timeout_ms) {
    engine_->CheckHere();
    if (request_.finished()) return true;
    const GilReleased released;
    aio::Request* const request = &request_;
    return engine_->get().WaitSome({&request, 1}, 1, timeout_ms) == 1;
  }
  void Cancel() {
    engine_->CheckHere();
    engine_->get().Cancel(&request_);
  }
  // Raises what went wrong. Only after its end.
  void Check() const {
    engine_->CheckHere();
    if (!request_.finished()) throw std::runtime_error("the transfer has not ended yet: wait for it first");
    RaiseUnlessOk(request_.status(), place_);
  }
  nb::object keep() const { return keep_; }

 private:
  std::shared_ptr<Owned<aio::Engine>> engine_;
  std::shared_ptr<Owned<aio::File>> file_;
  nb::object keep_;
  Place place_;
  aio::Request request_;
};

class PyEngine {
 public:
  PyEngine(uint64_t block_bytes, uint64_t bytes_in_flight, uint32_t blocks_in_flight, int threads,
           const std::string& backend)
      : log_(std::make_shared<LogLines>()) {
    aio::EngineOptions options;
    options.backend = ValueOrRaise(aio::ParseBackend(backend));
    options.block_bytes = block_bytes;
    options.max_read_bytes_in_flight = bytes_in_flight;
    options.max_write_bytes_in_flight = bytes_in_flight;
    options.max_blocks_in_flight = blocks_in_flight;
    options.worker_threads = threads;
    options.log = [log = log_](std::string_view line) {
      const std::lock_guard<std::mutex> lock(log->mutex);
      if (log->lines.size() < 1000) log->lines.emplace_back(line);
    };
    absl::StatusOr<std::unique_ptr<aio::Engine>> engine;
    {
      const GilReleased released;
      engine = aio::Engine::Create(std::move(options));
    }
    engine_ = MakeOwned(ValueOrRaise(std::move(engine)));
  }

  std::unique_ptr<Transfer> Start(aio::Op op, const PyFile& file, uint64_t offset, uint64_t address,
                                  uint64_t bytes, nb::object keep) {
    engine_->CheckHere();
    CheckAddress(address, bytes);
    auto transfer = std::make_unique<Transfer>(engine_, file.owned(), std::move(keep));
    transfer->Start(op, offset, address, bytes);
    return transfer;
  }
  std::unique_ptr<Transfer> Read(const PyFile& file, uint64_t offset, uint64_t address, uint64_t bytes,
                                 nb::object keep) {
    return Start(aio::Op::kRead, file, offset, address, bytes, std::move(keep));
  }
  std::unique_ptr<Transfer> Write(const PyFile& file, uint64_t offset, uint64_t address, uint64_t bytes,
                                  nb::object keep) {
    return Start(aio::Op::kWrite, file, offset, address, bytes, std::move(keep));
  }

  std::string Backend() const { return engine_->get().backend_name(); }
  bool Here() const { return engine_->here(); }
  std::vector<std::string> TakeLog() {
    const std::lock_guard<std::mutex> lock(log_->mutex);
    return std::exchange(log_->lines, {});
  }

 private:
  std::shared_ptr<LogLines> log_;
  std::shared_ptr<Owned<aio::Engine>> engine_;
};

// Locked memory of the whole process: pieces of arenas. A small piece shares an arena with others, and an
// arena goes with its last piece.
class LockedMemory {
 public:
  explicit LockedMemory(uint64_t bytes) : bytes_(bytes) {
    if (bytes == 0) throw nb::value_error("locked memory of 0 bytes");
    absl::Status status;
    {
      const GilReleased released;
      status = Take();
    }
    RaiseUnlessOk(status);
  }
  ~LockedMemory() {
    const GilReleased released;
    const std::lock_guard<std::mutex> lock(mutex_);
    region_.Release();
    arena_.reset();
    std::erase_if(arenas_, [](const auto& arena) { return arena.use_count() == 1; });
  }

  uint64_t address() const { return reinterpret_cast<uint64_t>(region_.data()); }
  uint64_t bytes() const { return bytes_; }
  bool locked() const { return arena_->locked(); }
  std::string pages() const { return std::string(aio::PageKindName(arena_->page_kind())); }

 private:
  static constexpr uint64_t kShared = 2 * aio::kMiB;

  absl::Status Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& arena : arenas_) {
      if (absl::StatusOr<aio::Region> region = arena->Allocate(bytes_); region.ok()) {
        region_ = std::move(*region);
        arena_ = arena;
        return absl::OkStatus();
      }
    }
    aio::ArenaOptions options;
    options.bytes = std::max(bytes_, kShared);
    absl::StatusOr<std::unique_ptr<aio::Arena>> arena = aio::Arena::Create(options);
    if (!arena.ok()) return arena.status();
    arena_ = std::move(*arena);
    absl::StatusOr<aio::Region> region = arena_->Allocate(bytes_);
    if (!region.ok()) return region.status();
    region_ = std::move(*region);
    arenas_.push_back(arena_);
    return absl::OkStatus();
  }

  inline static std::mutex mutex_;
  inline static std::vector<std::shared_ptr<aio::Arena>> arenas_;

  uint64_t bytes_;
  std::shared_ptr<aio::Arena> arena_;
  aio::Region region_;
};

}  // namespace

void BindAio(nb::module_& module) {
  nb::class_<PyFile>(module, "File", nb::is_weak_referenceable(),
                     "A file for direct I/O (through the page cache where its file system has none).")
      .def(nb::init<const std::string&, bool, bool, bool, bool, bool, uint64_t, int>(), nb::arg("path"),
           nb::kw_only(), nb::arg("write") = false, nb::arg("create") = false, nb::arg("truncate") = false,
           nb::arg("nameless") = false, nb::arg("direct") = true, nb::arg("size") = 0,
           nb::arg("descriptor") = -1)
      .def_prop_ro("path", [](const PyFile& file) { return file.file().path(); })
      .def_prop_ro("identity", &PyFile::Identity, "(device, inode): the same for two opens of one file.")
      .def("fileno", [](const PyFile& file) { return file.file().fd(); })
      .def("size", &PyFile::Size, "Bytes in the file now.")
      .def("resize", &PyFile::Resize, nb::arg("bytes"))
      .def("preallocate", &PyFile::Preallocate, nb::arg("bytes"))
      .def("sync", &PyFile::Sync, "fdatasync.");

  nb::class_<Transfer>(
      module, "Transfer", nb::is_weak_referenceable(),
      "A read or write under way. It keeps buffer, file and engine alive; dropping it cancels it.")
      .def_prop_ro("done", &Transfer::Done, "Whether it has ended, well or not.")
      .def_prop_ro("keep", &Transfer::keep)
      .def("wait", &Transfer::Wait, nb::arg("timeout_ms") = -1,
           "Waits without the GIL; True once it has ended.")
      .def("cancel", &Transfer::Cancel, "Asks for an early end.")
      .def("check", &Transfer::Check, "Raises what went wrong; only after its end.");

  nb::class_<PyEngine>(module, "Engine", "The I/O engine: its queue, its thread for each drive, its backend.")
      .def(nb::init<uint64_t, uint64_t, uint32_t, int, const std::string&>(), nb::kw_only(),
           nb::arg("block_bytes") = aio::kMiB, nb::arg("bytes_in_flight") = 16 * aio::kMiB,
           nb::arg("blocks_in_flight") = 256, nb::arg("threads") = 4, nb::arg("backend") = "auto")
      .def("read", &PyEngine::Read, nb::arg("file"), nb::arg("offset"), nb::arg("address"), nb::arg("bytes"),
           nb::arg("keep").none() = nb::none())
      .def("write", &PyEngine::Write, nb::arg("file"), nb::arg("offset"), nb::arg("address"),
           nb::arg("bytes"), nb::arg("keep").none() = nb::none())
      .def("take_log", &PyEngine::TakeLog, "What the engine had to say since the last call.")
      .def_prop_ro("here", &PyEngine::Here, "False in a forked child, where it must not be used.")
      .def_prop_ro("backend", &PyEngine::Backend);

  nb::class_<LockedMemory>(module, "LockedMemory", nb::is_weak_referenceable(),
                           "Page-aligned memory that stays in RAM, on huge pages where there are any.")
      .def(nb::init<uint64_t>(), nb::arg("bytes"))
      .def_prop_ro("address", &LockedMemory::address)
      .def_prop_ro("nbytes", &LockedMemory::bytes)
      .def_prop_ro("locked", &LockedMemory::locked)
      .def_prop_ro("pages", &LockedMemory::pages);
}

}  // namespace penstock::python
