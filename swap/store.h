// The state store: model state on disk that survives a kill at any moment.
//
// A store keeps *tiles*: pieces of a block's state of some MiB, each a list of *segments* (for instance high,
// low, m, v of the same parameters). Every tile has two home slots in preallocated files. The live version
// stands in one of them; a step writes the new version to the other; a commit record then makes all new
// versions live at once (swap/commit.h). After a kill, opening finds the newest whole record and with it one
// complete, unchanged version of everything. No allocator, no log, no fragmentation, no repair.
//
//   StoreOptions options;
//   options.directories = {"/nvme0/run", "/nvme1/run"};
//   auto store = Store::Create(*engine, options, layout, identity_json);  // or Store::Open(*engine, options)
//
//   TileIo read;  // one for each transfer in flight, reused
//   read.set_on_complete(&WakeExecutor, executor);
//   (*store)->ReadSegments(&read, tile, /*first=*/1, /*count=*/3, pointers, aio::Priority::kPrefetch);
//   ... when read.finished():  status = read.status();  // executor
//   status = (*store)->VerifyRead(read);                // a CPU worker
//
//   (*store)->WriteTile(&write, tile, version, pointers, aio::Priority::kWriteBehind);
//   checksums[s] = (*store)->SegmentChecksum(tile, s, version, data);  // a CPU worker, before or meanwhile
//   ... when write.finished(): status = (*store)->NoteWritten(&write, checksums);
//   ... when every tile of the step is noted: Commit, FinishCommit.
//
// Threads: one thread at a time (the executor) calls everything, except reads of a version that is held
// (Retain) and SegmentChecksum, VerifyRead, geometry() and the other const functions marked so, which any
// thread may call at any time. Completions are reported on the engine's I/O threads through the callbacks of
// TileIo and CommitIo, which do not touch the store's state. With the `sim` backend the same, all on the
// caller's thread. Nothing is allocated per transfer or commit once each CommitIo and TileIo has been used
// once.
//
// Ownership: the engine and its arenas outlive the store, which waits for its pending transfers when it is
// destroyed. TileIo, CommitIo and the memory that they move belong to the caller until
// finished.
//
// Errors of all functions: kInvalidArgument: the caller's numbers. kFailedPrecondition: not in this state
// (says what must come first), in use by another process, a foreign file, a newer format. kNotFound: no run
// to recover. kAlreadyExists: a run is there. kDataLoss: damage, a lost or swapped directory.
// kResourceExhausted: no space (says how much is missing). Everything else: what the operating system said,
// with path, offset, length and errno.
#ifndef PENSTOCK_SWAP_STORE_H_
#define PENSTOCK_SWAP_STORE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/request.h"
#include "base/process_mark.h"
#include "swap/aligned_buffer.h"
#include "swap/commit.h"
#include "swap/format.h"

namespace penstock::swap {

// What a commit survives.
enum class Sync : uint8_t {
  kProcess,  // the death of the process, SIGKILL included: no flush at all
  kPower,  // power loss and a crash of the kernel too: fdatasync of all files before the record, and after it
};

// Named moments at which a test may end the process (StoreOptions::at_crash_point). In order of their first
// occurrence.
enum class CrashPoint : uint8_t {
  kCreateFile,         // a store file exists and is empty
  kCreateReserved,     // its space is reserved
  kCreateSuperblock,   // a part of its superblock is written: bodies, header copy 1, header copy 0
  kCreateDone,         // all files and directories are synced
  kOverwriteRemoved,   // the files of the old run are gone
  kTileSubmitted,      // a tile's new version is on its way
  kTileWritten,        // it has been noted
  kCommitBegin,        // the record is encoded; nothing of the commit is on its way
  kCommitTilesSynced,  // power: all tiles are durable (process: reached as well, without a sync)
  kCommitSubmitted,    // the record's writes are on their way
  kCommitWritten,      // both copies are written
  kCommitSynced,       // power: the record is durable (process: reached as well, without a sync)
  kCommitDone,         // FinishCommit is about to return
};
inline constexpr int kCrashPoints = 13;
std::string_view CrashPointName(CrashPoint stage);  // "create-file", ..., "commit-done"

// A commit of a store, for a decision that is carried out later.
struct CommitSeen {
  Uuid uuid{};
  uint64_t sequence = 0;
  bool operator==(const CommitSeen&) const = default;
};

// Returns the newest commits of the stores in `directories`; of what is damaged or cannot be read something
// that no commit equals, and CheckSeen finds again. A store that FinishReplacement would put there is among
// them. `until_ns`: without those of a store whose file another
// process has modified later, in nanoseconds since the epoch; what a store of this process ended with is
// among them whenever that was.
std::vector<CommitSeen> SeeCommits(const std::vector<std::string>& directories,
                                   std::optional<int64_t> until_ns = std::nullopt);
// kFailedPrecondition: a store in `directories` has a newest commit that is not among `seen`.
absl::Status CheckSeen(const std::vector<std::string>& directories, std::span<const CommitSeen> seen);

struct StoreOptions {
  // Where the store's files are: 1 to kMaxDirectories. Create makes missing directories (mode 0700); Open
  // takes them in any order, since each file knows its index. A directory that is a symbolic link is followed
  // only if it belongs to the user or to root; a store file that is a link never is.
  std::vector<std::string> directories;
  Sync sync = Sync::kProcess;
  // How long opening waits for the lock: after a SIGKILL the kernel still finishes writes in flight.
  int lock_patience_ms = 10'000;
  bool allow_unaligned_file_system = false;  // see aio::FileOptions; for tests on tmpfs

  // Only for Create.
  std::vector<double>
      weights;  // share of bytes of each directory; empty: equal. Recorded through the tiles' homes
  // 2 for training; 3 to let a checkpoint keep a version for more than a step; 1 for what is written and
  // committed once, a checkpoint, and for training where space is short (StartOverwriting).
  uint32_t slots = 2;
  uint64_t payload_capacity = kDefaultPayloadCapacity;
  bool overwrite = false;  // remove the store files that are there, if they are ours and not in use
  // With `overwrite`: only as long as these are the newest commits there. kFailedPrecondition where another
  // run has committed meanwhile. Default: those that are there when Create is called.
  std::optional<std::vector<CommitSeen>> overwrites_only;
  std::optional<Uuid> uuid;  // else random; a checkpoint has its run's

  // Only for Open.
  bool read_only = false;  // for verify and export: nothing can be written
  // With read_only: the commit of this number, where it is the last but one (of several ranks not all may
  // have come as far). kDataLoss: it is there no more.
  std::optional<uint64_t> sequence;

  // Runs at every CrashPoint, on the thread that reaches it. Null in production.
  void (*at_crash_point)(CrashPoint stage, void* context) = nullptr;
  void* stage_context = nullptr;
};

// Bytes of the store file in each directory, before anything is created: pure. kInvalidArgument as Create.
absl::StatusOr<std::vector<uint64_t>> BytesOnDisk(const StoreOptions& options, const Layout& layout,
                                                  std::string_view identity);

// Refuses with kResourceExhausted when BytesOnDisk does not fit into what is free now (what --overwrite would
// set free is counted as free); the text says how much is needed, free and missing, by file system.
// `besides`: bytes of each directory that its user will put there too; empty: none.
absl::Status CheckSpace(const StoreOptions& options, const Layout& layout, std::string_view identity,
                        std::span<const uint64_t> besides = {});

// For whom a write finds no room although Create has reserved it: on file systems that cannot reserve, and
// where a copy shares the files' blocks. How much of the store files is there and how much is missing and
// free, in words; empty where they cannot be looked at.
std::string RoomText(const std::vector<std::string>& directories);

// Of the versions that a tile may have at once, the one that is read.
enum class VersionChoice : uint8_t {
  kNewest,     // the newest version that has been noted, committed or not
  kCommitted,  // the one of the last commit
  kRetained,   // the one held by Store::Retain
};

class Store;

// One transfer of a tile. Owned by the caller and reused. It must be left alone from submission until it is
// finished and, if it has a callback, until that has returned (Store::Wait waits for both).
class TileIo {
 public:
  // Runs on an I/O thread; must be short, must not block and must not call the store's non-const functions.
  using Callback = void (*)(TileIo& io, void* context);
  enum class Kind : uint8_t { kNone, kRead, kWrite, kReadScratch, kWriteScratch };

  TileIo() = default;
  TileIo(const TileIo&) = delete;
  TileIo& operator=(const TileIo&) = delete;

  void set_on_complete(Callback callback, void* context) {
    callback_ = callback;
    context_ = context;
  }
  bool finished() const { return request_.finished(); }  // any thread
  bool pending() const { return request_.pending(); }    // any thread
  // How it ended, naming tile and slot; once finished. A transferred read has yet to be verified.
  absl::Status status() const;

  Kind kind() const { return kind_; }
  uint32_t tile() const { return tile_; }
  uint32_t slot() const { return slot_; }
  uint64_t version() const { return version_; }
  uint32_t first_segment() const { return first_segment_; }
  uint32_t segment_count() const { return segment_count_; }
  // Memory of segment `first_segment() + i`.
  void* data(uint32_t i) const { return data_[i]; }
  // For cancelling, priorities and times. Never call Prepare* on it.
  aio::Request& request() { return request_; }
  const aio::Request& request() const { return request_; }

 private:
  friend class Store;

  aio::Request request_;
  Callback callback_ = nullptr;
  void* context_ = nullptr;
  Store* store_ = nullptr;
  Kind kind_ = Kind::kNone;
  uint32_t tile_ = 0;
  uint32_t slot_ = 0;
  uint64_t version_ = 0;
  uint32_t first_segment_ = 0;
  uint32_t segment_count_ = 0;
  std::array<void*, kMaxSegments> data_{};
  std::array<uint64_t, kMaxSegments> expected_{};    // checksums of what a read should find
  std::array<aio::Segment, kMaxSegments> memory_{};  // adjacent destinations merged
};

// The files of a run, locked, from Store::Close to the next Store::Open.
using HeldFiles = std::vector<std::unique_ptr<aio::File>>;

class Store {
 public:
  // Makes the files, with all their space and superblocks. Every tile must be written once, then Commit makes
  // the store a run. An error removes what was created. With options.overwrite old files go when the new ones
  // are durable; without room for both, first. kAlreadyExists: a store file is there, and it is not set.
  static absl::StatusOr<std::unique_ptr<Store>> Create(aio::Engine& engine, const StoreOptions& options,
                                                       const Layout& layout, const std::string& identity);
  // Locks and recovers the newest valid commit. With `sync: power` it is durable when this returns, whatever
  // became of the process that made it: its record is written and synced once more. kNotFound: no store file
  // in any of the directories, or one that was never committed (start over with Create and overwrite).
  // `held`: of the same run and options, which is locked already.
  static absl::StatusOr<std::unique_ptr<Store>> Open(aio::Engine& engine, const StoreOptions& options,
                                                     HeldFiles held = {});
  // Ends as destruction does, and keeps the run: nobody else may open it until an Open that is given these
  // files has ended it, or they are destroyed.
  static HeldFiles Close(std::unique_ptr<Store> store);
  // Ends as destruction does, and removes the files of a store that has no commit, as far as they still have
  // their names: while they are locked, so that they are nobody else's.
  static void Discard(std::unique_ptr<Store> store);
  // Waits for whatever is pending, then unlocks. What was written and not committed is as if it never was.
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // ---- any thread ----

  const Geometry& geometry() const { return geometry_; }
  const StoreShape& shape() const { return shape_; }
  const std::string& identity() const { return shape_.identity; }
  const Uuid& uuid() const { return shape_.uuid; }
  const StoreOptions& options() const { return options_; }
  // Empty (sequence 0) after Create.
  const Recovered& recovered() const { return recovered_; }
  // The file that holds a tile, for messages.
  const std::string& path(uint32_t tile) const { return files_[geometry_.directory(tile)]->path(); }

  // What NoteWritten wants for segment `segment` of a tile in that version; `data` has its true length
  // (geometry().segment_bytes). XXH3 speed.
  uint64_t SegmentChecksum(uint32_t tile, uint32_t segment, uint64_t version, const void* data) const;
  // Checks all segments of a finished read against the checksums that held when it was submitted. kDataLoss
  // names path, offset, length, tile, segment and version. kFailedPrecondition: not a finished, successful
  // read.
  absl::Status VerifyRead(const TileIo& io) const;
  // The same for one segment (first_segment() + i), to spread a tile over workers.
  absl::Status VerifySegment(const TileIo& io, uint32_t i) const;
  // The same for who computes the checksum where the segment has gone (a device): XXH3-64 of `bytes`, with
  // `seed`, is to be the one that VerifyChecksum is given.
  struct ChecksumOf {
    uint64_t bytes = 0;
    uint64_t seed = 0;
  };
  ChecksumOf ChecksumFor(const TileIo& io, uint32_t i) const;
  absl::Status VerifyChecksum(const TileIo& io, uint32_t i, uint64_t checksum) const;

  // Blocks until the transfer has ended and its callback has returned; returns io->status(). Not from a
  // callback.
  absl::Status Wait(TileIo* io) const;

  // ---- the executor's thread ----

  // Reads `count` consecutive segments from `first` on, each to its own destination of PaddedBytes(length)
  // bytes at a multiple of 4096 (other addresses work, through bounce buffers). Destinations that are
  // adjacent in the order of the slot become one transfer. kFailedPrecondition: there is no such version.
  absl::Status ReadSegments(TileIo* io, uint32_t tile, uint32_t first, uint32_t count,
                            std::span<void* const> destinations, aio::Priority priority,
                            VersionChoice choice = VersionChoice::kNewest);

  // Writes a whole new version of a tile to a slot that neither the last commit nor a retained version refers
  // to. `sources`: one for each segment, PaddedBytes(length) bytes long; what stands behind the true length
  // goes to disk as well and means nothing (zero it if it may hold secrets). `version` is above the committed
  // one. A version written before and not yet committed is overwritten: it is gone from here on.
  // kFailedPrecondition: the tile has a write in flight; a commit is in flight or has failed (until it is
  // done, the slots that the commit before it refers to may still be what recovery needs).
  absl::Status WriteTile(TileIo* io, uint32_t tile, uint64_t version, std::span<const void* const> sources,
                         aio::Priority priority);
  // The same in parts: `sources` are for the consecutive segments from `first` on. The first part of a
  // version begins it; the others follow one by one, each when the one before is noted. Until all segments
  // stand there the tile has no new version, and nothing can be committed (DropWritten gives the parts up).
  absl::Status WriteSegments(TileIo* io, uint32_t tile, uint64_t version, uint32_t first,
                             std::span<const void* const> sources, aio::Priority priority);
  // Takes notice of a finished WriteTile or WriteSegments, with the checksums of the segments that it wrote.
  // When all of them are there, this is the newest version, and what the next commit makes live. Returns the
  // transfer's error if it failed; the tile then has to be written again, or dropped, before anything can be
  // committed.
  absl::Status NoteWritten(TileIo* io, std::span<const uint64_t> checksums);
  // One tile and its checksums, for those who have nothing else to do: ReadSegments of all of it, Wait and
  // VerifyRead; WriteTile, Wait and NoteWritten.
  absl::Status ReadTileNow(TileIo* io, uint32_t tile, std::span<void* const> destinations,
                           aio::Priority priority, VersionChoice choice = VersionChoice::kNewest);
  absl::Status WriteTileNow(TileIo* io, uint32_t tile, uint64_t version, std::span<const void* const> sources,
                            aio::Priority priority);
  // Forgets what was written and not committed (a skipped or undone update): the committed version is the
  // newest again. kFailedPrecondition while a write of the tile is in flight.
  absl::Status DropWritten(uint32_t tile);
  absl::Status DropAllWritten();

  // Unversioned, unchecked bytes beside the tile; gone after a kill. Any range within scratch_bytes(tile).
  absl::Status WriteScratch(TileIo* io, uint32_t tile, uint64_t offset, const void* source, uint64_t bytes,
                            aio::Priority priority);
  absl::Status ReadScratch(TileIo* io, uint32_t tile, uint64_t offset, void* destination, uint64_t bytes,
                           aio::Priority priority);

  // Starts a commit; returns at once. kFailedPrecondition: a tile was never written, a write is in flight or
  // has failed, another commit is in flight. kInvalidArgument: step below the last one, payload too long.
  absl::Status Commit(CommitIo* io, const CommitInfo& info);
  // Takes notice of a finished commit, and returns how it ended. On success the new versions are live. On
  // failure nothing may be written until Commit was tried again with success; a failed fdatasync leaves no
  // way but to reopen.
  absl::Status FinishCommit(CommitIo* io);
  // Commit, wait and FinishCommit, for those who have nothing else to do.
  absl::Status CommitNow(const CommitInfo& info);

  // For a store of one slot that is trained in: from the end of this (FinishCommit) to the next commit, tiles
  // may be written over the only version that there is. A record says so on the disk before the first of them
  // is: who opens the store in between is refused (kDataLoss) and never given tiles of two steps. Failed, it
  // changed nothing in memory and may be tried again (on the disk the mark may stand), unless it was a sync
  // that failed. kFailedPrecondition: more slots than one, nothing committed since, a version is held, a
  // commit is in flight or has failed.
  absl::Status StartOverwriting(CommitIo* io);
  // The same for the first commit of a state that no later start could make anew: restored or imported
  // values. It is made twice, so that its record stands in both places: damage to one of them loses nothing,
  // and damage to both is never taken for a run that was not committed.
  absl::Status CommitGiven(const CommitInfo& info);
  absl::Status OverwriteNow();
  bool overwriting() const { return record_.overwriting; }
  // For a store whose ranks did not all come as far: takes back the last commit, whose number is the one
  // after `sequence`. Its record is erased, so that no later recovery finds it; recovered() and committed_*()
  // are those of `sequence` from then on. Only while nothing is in flight, written or held
  // (kFailedPrecondition); kDataLoss: the store has that commit no more, as one that keeps one version never
  // has.
  absl::Status GoBackTo(uint64_t sequence);

  // The state of the last commit: what recovery would find now.
  uint64_t committed_sequence() const { return record_.sequence; }
  uint64_t committed_step() const { return record_.step; }
  uint64_t committed_updates() const { return record_.updates; }
  const std::string& committed_payload() const { return record_.payload; }
  TileVersion committed(uint32_t tile) const { return record_.tiles[tile]; }  // version 0: never committed
  uint64_t committed_checksum(uint32_t tile, uint32_t segment) const {
    return record_.checksums[geometry_.first_segment(tile) + segment];
  }
  // Version that kNewest reads; 0: none.
  uint64_t newest_version(uint32_t tile) const;

  // Holds the committed versions of all tiles, so that they can be copied out while training goes on:
  // WriteTile keeps off their slots. With three slots a tile can be written as often as one likes meanwhile;
  // with two until the next commit, and is refused after it. kFailedPrecondition: nothing committed, a commit
  // in flight, a version held already. While it is held, one more thread may read it (ReadSegments with
  // kRetained).
  absl::Status Retain();
  void Release();
  // The record as it stood at Retain; null if nothing is held.
  const Record* retained() const { return retained_ ? &*retained_ : nullptr; }

  aio::Engine& engine() const { return engine_; }
  aio::File& file(uint32_t directory) const { return *files_[directory]; }

 private:
  // What is written of a tile and not yet committed.
  struct Written {
    enum class State : uint8_t { kNone, kWriting, kInParts, kNoted, kFailed };
    State state = State::kNone;
    uint32_t slot = 0;
    uint64_t version = 0;
    uint32_t there = 0;  // its segments that are noted, a bit each
  };

  Store(aio::Engine& engine, const StoreOptions& options, StoreShape shape, Geometry geometry);
  void At(CrashPoint stage) const {
    if (options_.at_crash_point != nullptr) options_.at_crash_point(stage, options_.stage_context);
  }
  absl::Status CheckTile(uint32_t tile) const;
  absl::Status CheckReadSegment(const TileIo& io, uint32_t i) const;
  absl::Status CheckWritable() const;
  absl::Status Submit(TileIo* io, TileIo::Kind kind, uint32_t tile, aio::Priority priority);
  absl::Status Scratch(TileIo* io, TileIo::Kind kind, uint32_t tile, uint64_t offset, void* data,
                       uint64_t bytes, aio::Priority priority);
  void AwaitAll();  // what is pending
  void NoteOwnCommit() const;
  absl::Status Recover();
  absl::Status MakeDurable();
  absl::Status RewriteTakenBack();
  void SizeTables();
  uint32_t FreeSlot(uint32_t tile) const;
  static void OnTileDone(aio::Request& request, void* context);
  static void OnCommitRequestDone(aio::Request& request, void* context);
  void StartRecord(CommitIo* io);
  absl::Status AwaitCommit(CommitIo* io);
  void StartCommitStage(CommitIo* io, CommitIo::Step stage);
  void EndCommit(CommitIo* io);

  const ProcessMark made_in_;
  aio::Engine& engine_;
  StoreOptions options_;
  StoreShape shape_;
  Geometry geometry_;
  Recovered recovered_;
  std::vector<std::unique_ptr<aio::File>> files_;  // by directory index

  Record record_;  // of the last commit; sequence 0 before the first
  std::vector<Written> written_;
  std::vector<uint64_t> written_checksums_;
  uint32_t writing_ = 0;  // tiles in state kWriting
  std::optional<Record> retained_;

  CommitIo* commit_ = nullptr;  // in flight: until FinishCommit
  Record next_;                 // what the commit in flight or failed says
  AlignedBuffer record_buffer_;
  enum class Health : uint8_t { kGood, kCommitFailed, kSyncFailed };
  Health health_ = Health::kGood;
  std::atomic<uint64_t> transfers_{0};  // pending TileIo
};

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_STORE_H_
