#include "aio/sim_disk.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"

namespace penstock::aio {
namespace {

constexpr uint64_t kChunkBytes = 256 * kKiB;
constexpr uint64_t kSimSector = kSectorBytes;  // the unit of torn writes and crashes

using Chunk = std::unique_ptr<std::byte[]>;

// Contents: chunks exist once they are written; what was never written reads as zeros.
struct Inode {
  uint64_t bytes = 0;
  std::map<uint64_t, Chunk> chunks;
  std::map<uint64_t, std::vector<std::byte>> unsynced;   // sector index -> what it held at the last sync
  std::map<uint64_t, std::vector<std::byte>> forgotten;  // likewise, of those that a failed sync gave up
  const void* locked_by = nullptr;
};

void CopyOut(const Inode& inode, uint64_t offset, std::byte* out, uint64_t bytes) {
  while (bytes != 0) {
    const uint64_t within = offset % kChunkBytes;
    const uint64_t run = std::min(bytes, kChunkBytes - within);
    const auto chunk = inode.chunks.find(offset / kChunkBytes);
    if (chunk == inode.chunks.end()) {
      std::memset(out, 0, run);
    } else {
      std::memcpy(out, chunk->second.get() + within, run);
    }
    offset += run;
    out += run;
    bytes -= run;
  }
}

void CopyIn(Inode& inode, uint64_t offset, const std::byte* in, uint64_t bytes) {
  inode.bytes = std::max(inode.bytes, offset + bytes);
  while (bytes != 0) {
    const uint64_t within = offset % kChunkBytes;
    const uint64_t run = std::min(bytes, kChunkBytes - within);
    Chunk& chunk = inode.chunks[offset / kChunkBytes];
    if (chunk == nullptr) chunk = std::make_unique<std::byte[]>(kChunkBytes);
    std::memcpy(chunk.get() + within, in, run);
    offset += run;
    in += run;
    bytes -= run;
  }
}

// splitmix64: the same numbers on every machine and standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  // Draws in every case, so that switching one fault on does not shift all others.
  bool Chance(double rate) { return Unit() < rate; }
  uint64_t Below(uint64_t limit) { return Next() % limit; }

 private:
  uint64_t state_;
};

}  // namespace

struct SimFile {
  std::string path;
  std::shared_ptr<Inode> inode;
  uint64_t generation = 0;  // of the disk, when it was opened
};

struct SimDisk::State {
  enum class Fate : uint8_t { kWhole, kTorn, kLost, kMisdirected };

  struct Pending {
    Transfer transfer;
    uint64_t sequence = 0;
    uint64_t bytes = 0;  // to be moved, if `error` is 0
    int error = 0;
    Fate fate = Fate::kWhole;
    std::shared_ptr<Inode> inode;
    bool LaterThan(const Pending& other) const {
      return std::pair(transfer.due_ns, sequence) > std::pair(other.transfer.due_ns, other.sequence);
    }
  };

  struct PlacedFault {
    Op op;
    int error;
    int count;
    std::string path_part;
  };

  struct BadRange {
    std::string path;
    uint64_t begin;
    uint64_t end;
  };

  explicit State(const SimDiskOptions& o) : options(o), random(o.seed), rates(o.rates) {
    channel_free_ns.resize(static_cast<size_t>(std::max(1, o.channels)));
  }

  const SimDiskOptions& options;
  mutable std::mutex mutex;
  std::vector<std::pair<std::string, SimDisk*>> mounted;
  Random random;
  SimFaultRates rates;
  std::vector<PlacedFault> placed;
  std::vector<BadRange> bad;
  std::map<std::string, std::shared_ptr<Inode>> files;
  std::vector<Pending> pending;  // a heap, the earliest first
  std::vector<int64_t> channel_free_ns;
  uint64_t sequence = 0;
  uint64_t generation = 0;
  double slow = 1;
  bool crashed = false;
  SimDiskStats stats;

  uint64_t AllocatedBytes() const {
    uint64_t total = 0;
    for (const auto& [path, inode] : files) total += inode->bytes;
    return total;
  }

  int ErrorOf(const Pending& pending_transfer);
  void Decide(Pending& p);
  int64_t DueNs(const Transfer& transfer, bool stalls);
  void Apply(Pending& p);
  void Write(Inode& inode, uint64_t offset, const std::byte* data, uint64_t bytes, bool remember);
};

SimDisk::SimDisk(const SimDiskOptions& options)
    : options_(options), state_(std::make_unique<State>(options_)) {}
SimDisk::~SimDisk() = default;

// The errno that a transfer is bound to end with, 0 for none.
int SimDisk::State::ErrorOf(const Pending& p) {
  const Transfer& t = p.transfer;
  if (crashed || t.file->generation != generation) return EIO;
  const bool write = t.op == Op::kWrite;
  if (t.op != Op::kSync) {
    const auto address = reinterpret_cast<uint64_t>(t.data);
    if (!IsAligned(t.offset, options.offset_alignment) || !IsAligned(t.bytes, options.offset_alignment) ||
        !IsAligned(address, options.memory_alignment)) {
      ++stats.misaligned;
      return EINVAL;
    }
  }
  for (PlacedFault& fault : placed) {
    if (fault.count == 0 || fault.op != t.op || t.file->path.find(fault.path_part) == std::string::npos)
      continue;
    --fault.count;
    ++(fault.error == ENOSPC ? stats.no_space : write ? stats.write_errors : stats.read_errors);
    return fault.error;
  }
  for (const BadRange& range : bad) {
    if (range.path == t.file->path && t.offset < range.end && t.offset + t.bytes > range.begin) {
      ++(write ? stats.write_errors : stats.read_errors);
      return EIO;
    }
  }
  if (t.op == Op::kSync) return 0;
  const bool fails = random.Chance(write ? rates.write_error : rates.read_error);
  const bool full = random.Chance(write ? rates.no_space : 0);
  if (fails) {
    ++(write ? stats.write_errors : stats.read_errors);
    return EIO;
  }
  const uint64_t end = t.offset + t.bytes;
  if (write &&
      (full || (end > p.inode->bytes && AllocatedBytes() - p.inode->bytes + end > options.capacity_bytes))) {
    ++stats.no_space;
    return ENOSPC;
  }
  return 0;
}

void SimDisk::State::Decide(Pending& p) {
  const Transfer& t = p.transfer;
  p.error = ErrorOf(p);
  p.bytes = t.bytes;
  if (t.op == Op::kSync || p.error != 0) return;
  const bool is_short = random.Chance(rates.short_transfer);
  const uint64_t sectors = t.bytes / kSimSector;
  if (is_short && sectors > 1) {
    ++stats.short_transfers;
    p.bytes = (1 + random.Below(sectors - 1)) * kSimSector;
  }
  if (t.op != Op::kWrite) return;
  const bool torn = random.Chance(rates.torn_write);
  const bool lost = random.Chance(rates.lost_write);
  const bool misdirected = random.Chance(rates.misdirected_write);
  if (lost) {
    ++stats.lost_writes;
    p.fate = Fate::kLost;
  } else if (misdirected && p.inode->bytes > t.bytes) {
    ++stats.misdirected_writes;
    p.fate = Fate::kMisdirected;
  } else if (torn) {
    ++stats.torn_writes;
    p.fate = Fate::kTorn;
  }
}

// Served in order of arrival by the channel that is free first; the latency overlaps with the next transfer.
int64_t SimDisk::State::DueNs(const Transfer& transfer, bool stalls) {
  const int64_t now = options.clock->NowNs();
  const double rate = transfer.op == Op::kWrite ? options.write_bytes_per_s : options.read_bytes_per_s;
  const auto channels = static_cast<double>(channel_free_ns.size());
  const double service =
      transfer.op == Op::kSync ? 0 : static_cast<double>(transfer.bytes) * channels / rate * 1e9;
  const double latency =
      static_cast<double>(options.latency_ns) * (1 + options.latency_jitter * (2 * random.Unit() - 1));
  auto& channel = *std::min_element(channel_free_ns.begin(), channel_free_ns.end());
  const int64_t start = std::max(now, channel);
  channel = start + static_cast<int64_t>(service * slow);
  return channel + static_cast<int64_t>(latency * slow) + (stalls ? options.stall_ns : 0);
}

void SimDisk::Start(const Transfer& transfer) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  State::Pending p;
  p.transfer = transfer;
  p.inode = transfer.file->inode;
  p.sequence = state_->sequence++;
  state_->Decide(p);
  const bool stalls = state_->random.Chance(state_->rates.stall);
  if (stalls) ++state_->stats.stalls;
  p.transfer.due_ns = state_->DueNs(transfer, stalls);
  state_->pending.push_back(std::move(p));
  std::push_heap(state_->pending.begin(), state_->pending.end(),
                 [](const auto& a, const auto& b) { return a.LaterThan(b); });
}

void SimDisk::State::Write(Inode& inode, uint64_t offset, const std::byte* data, uint64_t bytes,
                           bool remember) {
  if (remember) {
    for (uint64_t sector = offset / kSimSector; sector * kSimSector < offset + bytes; ++sector) {
      if (auto forgotten = inode.forgotten.extract(sector); !forgotten.empty())
        inode.unsynced.insert(std::move(forgotten));
      auto [entry, fresh] = inode.unsynced.try_emplace(sector);
      if (!fresh) continue;
      entry->second.resize(kSimSector);
      CopyOut(inode, sector * kSimSector, entry->second.data(), kSimSector);
    }
  }
  CopyIn(inode, offset, data, bytes);
}

void SimDisk::State::Apply(Pending& p) {
  Transfer& t = p.transfer;
  Inode& inode = *p.inode;
  if (p.error != 0) {
    if (t.op == Op::kSync && t.file->generation == generation) inode.forgotten.merge(inode.unsynced);
    t.result = -p.error;
    return;
  }
  if (t.op == Op::kSync) {
    ++stats.syncs;
    inode.unsynced.clear();
    t.result = 0;
    return;
  }
  if (t.op == Op::kRead) {
    const uint64_t there = t.offset >= inode.bytes ? 0 : std::min(p.bytes, inode.bytes - t.offset);
    CopyOut(inode, t.offset, t.data, there);
    ++stats.reads;
    stats.read_bytes += there;
    t.result = static_cast<int64_t>(there);
    return;
  }
  ++stats.writes;
  stats.write_bytes += p.bytes;
  t.result = static_cast<int64_t>(p.bytes);
  const bool remember = options.volatile_cache;
  const uint64_t sectors = p.bytes / kSimSector;
  switch (p.fate) {
    case Fate::kWhole:
      Write(inode, t.offset, t.data, p.bytes, remember);
      return;
    case Fate::kLost:
      return;
    case Fate::kMisdirected: {
      const uint64_t places = (inode.bytes - p.bytes) / kSimSector + 1;
      uint64_t place = random.Below(places) * kSimSector;
      if (place == t.offset) place = (place + kSimSector) % (places * kSimSector);
      Write(inode, place, t.data, p.bytes, remember);
      return;
    }
    case Fate::kTorn: {
      const uint64_t dropped = random.Below(sectors);  // at least this one
      for (uint64_t i = 0; i < sectors; ++i) {
        const bool keep = random.Chance(0.5);
        if (i == dropped || !keep) continue;
        Write(inode, t.offset + i * kSimSector, t.data + i * kSimSector, kSimSector, remember);
      }
      return;
    }
  }
}

size_t SimDisk::Reap(Transfer* out, size_t max) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const int64_t now = options_.clock->NowNs();
  size_t count = 0;
  while (count < max && !state_->pending.empty() && state_->pending.front().transfer.due_ns <= now) {
    std::pop_heap(state_->pending.begin(), state_->pending.end(),
                  [](const auto& a, const auto& b) { return a.LaterThan(b); });
    State::Pending p = std::move(state_->pending.back());
    state_->pending.pop_back();
    state_->Apply(p);
    out[count++] = p.transfer;
  }
  return count;
}

int64_t SimDisk::NextDueNs() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->pending.empty() ? INT64_MAX : state_->pending.front().transfer.due_ns;
}

size_t SimDisk::in_flight() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->pending.size();
}

void SimDisk::Crash() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  State& s = *state_;
  ++s.stats.crashes;
  s.crashed = true;
  ++s.generation;
  // In order of submission, so that the draws do not depend on the heap's shape.
  std::sort(s.pending.begin(), s.pending.end(),
            [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
  for (State::Pending& p : s.pending) {
    Transfer& t = p.transfer;
    if (t.op == Op::kWrite && p.error == 0 && p.fate == State::Fate::kWhole) {
      for (uint64_t at = 0; at + kSimSector <= p.bytes; at += kSimSector) {
        if (s.random.Chance(0.5)) {
          s.Write(*p.inode, t.offset + at, t.data + at, kSimSector, options_.volatile_cache);
        } else {
          ++s.stats.sectors_dropped_by_crash;
        }
      }
    }
    p.error = EIO;
    t.due_ns = options_.clock->NowNs();
  }
  std::make_heap(s.pending.begin(), s.pending.end(),
                 [](const auto& a, const auto& b) { return a.LaterThan(b); });
  for (auto& [path, inode] : s.files) {
    inode->locked_by = nullptr;
    inode->unsynced.merge(inode->forgotten);
    inode->forgotten.clear();
    for (const auto& [sector, before] : inode->unsynced) {
      if (s.random.Chance(0.5)) continue;
      ++s.stats.sectors_dropped_by_crash;
      const uint64_t offset = sector * kSimSector;
      if (offset < inode->bytes)
        CopyIn(*inode, offset, before.data(), std::min(kSimSector, inode->bytes - offset));
    }
    inode->unsynced.clear();
  }
  std::fill(s.channel_free_ns.begin(), s.channel_free_ns.end(), 0);
}

void SimDisk::EndProcess() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  State& s = *state_;
  std::sort(s.pending.begin(), s.pending.end(),
            [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
  for (State::Pending& p : s.pending) {
    // Nobody is there to read into. A sync on its way comes to its end or not.
    if (p.transfer.op == Op::kWrite || (p.transfer.op == Op::kSync && s.random.Chance(0.5))) s.Apply(p);
    p.error = EIO;
    p.transfer.due_ns = options_.clock->NowNs();
  }
  std::make_heap(s.pending.begin(), s.pending.end(),
                 [](const auto& a, const auto& b) { return a.LaterThan(b); });
  ++s.generation;
  for (auto& [path, inode] : s.files) inode->locked_by = nullptr;
  std::fill(s.channel_free_ns.begin(), s.channel_free_ns.end(), 0);
}

void SimDisk::Restart() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->crashed = false;
}

bool SimDisk::crashed() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->crashed;
}

void SimDisk::set_rates(const SimFaultRates& rates) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->rates = rates;
}

void SimDisk::FailNext(Op op, int error, int count, const std::string& path_part) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->placed.push_back({op, error, count, path_part});
}

void SimDisk::MarkBad(const std::string& path, uint64_t offset, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->bad.push_back({path, offset, offset + bytes});
}

void SimDisk::ClearBadRanges() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->bad.clear();
}

void SimDisk::Mount(const std::string& directory, SimDisk* other) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->mounted.emplace_back(directory, other);
}

SimDisk* SimDisk::DiskOf(const std::string& path) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  for (const auto& [directory, disk] : state_->mounted) {
    if (path.starts_with(directory)) return disk;
  }
  return this;
}

void SimDisk::SlowDown(double factor) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->slow = factor;
}

std::vector<std::string> SimDisk::ListFiles() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<std::string> paths;
  for (const auto& [path, inode] : state_->files) paths.push_back(path);
  return paths;
}

bool SimDisk::Exists(const std::string& path) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->files.count(path) != 0;
}

namespace {

absl::Status SimError(std::string_view op, const std::string& path, const std::string& device, int error) {
  return MakeIoError({.op = op, .path = path, .device = device, .error = error});
}

}  // namespace

absl::StatusOr<std::string> SimDisk::Read(const std::string& path, uint64_t offset, uint64_t bytes) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto file = state_->files.find(path);
  if (file == state_->files.end()) return SimError("read", path, options_.name, ENOENT);
  const uint64_t there = offset >= file->second->bytes ? 0 : std::min(bytes, file->second->bytes - offset);
  std::string data(there, '\0');
  CopyOut(*file->second, offset, reinterpret_cast<std::byte*>(data.data()), there);
  return data;
}

absl::Status SimDisk::Write(const std::string& path, uint64_t offset, std::string_view data) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<Inode>& inode = state_->files[path];
  if (inode == nullptr) inode = std::make_shared<Inode>();
  CopyIn(*inode, offset, reinterpret_cast<const std::byte*>(data.data()), data.size());
  return absl::OkStatus();
}

absl::Status SimDisk::Remove(const std::string& path) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->files.erase(path) != 0 ? absl::OkStatus() : SimError("remove", path, options_.name, ENOENT);
}

absl::Status SimDisk::Rename(const std::string& from, const std::string& to) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto file = state_->files.find(from);
  if (file == state_->files.end()) return SimError("rename", from, options_.name, ENOENT);
  std::shared_ptr<Inode> inode = std::move(file->second);
  state_->files.erase(file);
  state_->files[to] = std::move(inode);
  return absl::OkStatus();
}

SimDiskStats SimDisk::stats() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  SimDiskStats stats = state_->stats;
  stats.allocated_bytes = state_->AllocatedBytes();
  return stats;
}

absl::StatusOr<std::shared_ptr<SimFile>> SimDisk::OpenFile(const std::string& path, bool create,
                                                           bool exclusive, bool truncate) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->crashed) return SimError("open", path, options_.name, EIO);
  auto file = state_->files.find(path);
  if (file == state_->files.end()) {
    if (!create) return SimError("open", path, options_.name, ENOENT);
    file = state_->files.emplace(path, std::make_shared<Inode>()).first;
  } else if (create && exclusive) {
    return SimError("open", path, options_.name, EEXIST);
  }
  if (truncate) {
    file->second->bytes = 0;
    file->second->chunks.clear();
    file->second->unsynced.clear();
    file->second->forgotten.clear();
  }
  auto handle = std::make_shared<SimFile>();
  handle->path = path;
  handle->inode = file->second;
  handle->generation = state_->generation;
  return handle;
}

uint64_t SimDisk::FileBytes(const SimFile& file) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return file.inode->bytes;
}

absl::Status SimDisk::Resize(SimFile& file, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->crashed || file.generation != state_->generation)
    return SimError("resize", file.path, options_.name, EIO);
  Inode& inode = *file.inode;
  if (bytes > inode.bytes) {
    const uint64_t others = state_->AllocatedBytes() - inode.bytes;
    if (others + bytes > options_.capacity_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "preallocate ", file.path, " (", options_.name, "): ", FormatBytes(bytes), " asked for, ",
          FormatBytes(options_.capacity_bytes - std::min(options_.capacity_bytes, others)),
          " free: ", ErrnoText(ENOSPC)));
    }
  } else {
    // What lies beyond the new end reads as zeros if the file grows again.
    inode.chunks.erase(inode.chunks.lower_bound((bytes + kChunkBytes - 1) / kChunkBytes), inode.chunks.end());
    const auto last = inode.chunks.find(bytes / kChunkBytes);
    if (last != inode.chunks.end()) {
      std::memset(last->second.get() + bytes % kChunkBytes, 0, kChunkBytes - bytes % kChunkBytes);
    }
  }
  inode.bytes = bytes;
  return absl::OkStatus();
}

absl::Status SimDisk::Sync(SimFile& file) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->crashed || file.generation != state_->generation)
    return SimError("fdatasync", file.path, options_.name, EIO);
  ++state_->stats.syncs;
  file.inode->unsynced.clear();
  return absl::OkStatus();
}

absl::Status SimDisk::Lock(SimFile& file, const void* owner) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->crashed || file.generation != state_->generation)
    return SimError("lock", file.path, options_.name, EIO);
  if (file.inode->locked_by != nullptr && file.inode->locked_by != owner) {
    return absl::FailedPreconditionError(absl::StrCat("lock ", file.path, ": held by another"));
  }
  file.inode->locked_by = owner;
  return absl::OkStatus();
}

void SimDisk::Unlock(SimFile& file, const void* owner) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (file.inode->locked_by == owner) file.inode->locked_by = nullptr;
}

}  // namespace penstock::aio
