// Messages are matched by a number alone. So that number is made of what the message is and of its size:
// ranks that are at different exchanges wait, and their signs of life, which say what each is at, tell rank
// 0.
#include "zero/ranks/watched_comm.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "zero/memory/guarded.h"
#include "zero/ranks/handshake.h"
#include "zero/ranks/rank_position.h"

namespace penstock::zero {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kFailedKey = "failed";
constexpr int kChannelShift = 56;
constexpr const char* kEnd = "the end of the run";
constexpr size_t kCallsTold = 16;    // the newest
constexpr double kLongestWait = 60;  // patiences, and however short those are
constexpr double kLeastLongestWaitSeconds = 1800;
constexpr double kSlackSeconds = 2;  // for what ends a wait from elsewhere to come first
constexpr auto kNever = Clock::time_point::max();

uint64_t Digest(std::string_view text, uint64_t seed) {
  return kernels::Checksum(text.data(), text.size(), seed);
}

// The number of a message: its channel, its place there, and what it is.
uint64_t SlotOf(Channel channel, uint64_t number, const What& what, size_t bytes) {
  const std::array<uint64_t, 6> words = {static_cast<uint64_t>(what.step),
                                         static_cast<uint64_t>(what.block),
                                         static_cast<uint64_t>(what.piece),
                                         what.calls,
                                         bytes,
                                         Digest(what.name, 0)};
  const uint64_t digest = kernels::Checksum(words.data(), sizeof(words));
  return (static_cast<uint64_t>(channel) << kChannelShift) | ((number & 0xffffff) << 32) | (digest >> 32);
}

// What is told of a failure, to all ranks: whose words are wrong is told so everywhere, with its exit code.
constexpr size_t kMostNoted = 2000;  // bytes
absl::StatusCode CodeForAll(absl::StatusCode code) {
  const bool wrong = code == absl::StatusCode::kInvalidArgument ||
                     code == absl::StatusCode::kFailedPrecondition ||
                     code == absl::StatusCode::kAlreadyExists;
  return wrong ? code : absl::StatusCode::kUnavailable;
}
// "4 text".
std::string Coded(absl::StatusCode code, std::string_view text) {
  return absl::StrCat(static_cast<int>(CodeForAll(code)), " ", OneLine(text, kMostNoted));
}

// The address under which this host talks to the master, which is the one that other ranks can reach it by.
absl::StatusOr<std::string> OwnAddress(const std::string& master, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(master.c_str(), std::to_string(port).c_str(), &hints, &found);
      error != 0) {
    return absl::UnavailableError(absl::StrCat("MASTER_ADDR=", master, ": ", gai_strerror(error)));
  }
  std::string address;
  for (const addrinfo* each = found; each != nullptr && address.empty(); each = each->ai_next) {
    const int fd = socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    char text[NI_MAXHOST];
    // Nothing is sent: a datagram socket that is connected has only chosen its way.
    if (connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      address = text;
    }
    close(fd);
  }
  freeaddrinfo(found);
  if (address.empty())
    return absl::UnavailableError(absl::StrCat("no way from this host to MASTER_ADDR=", master));
  return address;
}

class WatchedComm;

class WatchedExchange : public Exchange {
 public:
  WatchedExchange(WatchedComm* comm, Channel channel, const What& what, size_t bytes)
      : comm_(comm), channel_(channel), what_(what), bytes_(bytes) {}
  ~WatchedExchange() override;
  absl::Status Wait() override;
  std::string Text() const { return what_.Text(bytes_); }

  WatchedComm* const comm_;
  const Channel channel_;
  const What what_;
  const size_t bytes_;
  struct Peer {
    int rank;
    std::unique_ptr<Message> sends, receives;
  };
  std::vector<Peer> peers_;
  // Under the comm's lock:
  uint64_t number_ = 0;                     // on its channel
  Clock::time_point waits_since_ = kNever;  // since when somebody waits for it
  int waits_for_ = -1;                      // and for which rank
};

class WatchedComm : public Comm {
 public:
  WatchedComm(MeshMaker make, std::string kind, const RankEnvironment& environment, const WatchOver& options)
      : Comm(environment),
        make_(std::move(make)),
        kind_(std::move(kind)),
        options_(options.comm),
        secret_(options.secret),
        secret_way_(options.secret_way),
        prefix_(absl::StrCat("penstock/", environment.session, "/")),
        store_(options.store) {}

  ~WatchedComm() override {
    bool aborted;
    {
      std::lock_guard lock(mutex_);
      aborted = !failure_.ok();
      closing_ = true;
    }
    if (!aborted && mesh_ != nullptr) TakeLeave();
    stopping_.store(true);
    stop_.notify_all();
    if (beats_.joinable()) beats_.join();
    if (mesh_ != nullptr) mesh_->Close();
    Leave();
    left_.store(true);
    stop_.notify_all();
    if (watch_.joinable()) watch_.join();  // the last: all of this may wait for a store that does not answer
  }

  std::string name() const override { return absl::StrCat(kind_, " over ", address_); }

  absl::Status Connect() {
    // The mesh and the store throw.
    absl::Status status;
    const absl::Status thrown = Guarded("connecting the ranks", [&] { status = Meet(); });
    status.Update(thrown);
    if (!status.ok()) Abort(status);
    return status;
  }

  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, const What& what,
                                                  std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    auto exchange = std::make_unique<WatchedExchange>(this, channel, what, bytes);
    if (bytes == 0) return exchange;
    int peer = rank();
    try {
      // Each begins with the next one, so that not all send to the same.
      for (int i = 1; i < world(); ++i) {
        peer = (rank() + i) % world();
        const auto k = static_cast<size_t>(peer);
        exchange->peers_.push_back(
            {peer, mesh_->Send(peer, send[k], bytes), mesh_->Receive(peer, receive[k], bytes)});
      }
      RETURN_IF_ERROR(Register(exchange.get()));
      const uint64_t slot = SlotOf(channel, exchange->number_, what, bytes);
      for (const WatchedExchange::Peer& with : exchange->peers_) {
        peer = with.rank;
        with.receives->Start(slot);
        with.sends->Start(slot);
      }
    } catch (const std::exception& error) {
      return Lost(peer, error.what());
    }
    return exchange;
  }

  void Enter(const std::string& call) override {
    std::lock_guard lock(mutex_);
    calls_digest_ = Digest(call, calls_digest_);
    newest_calls_[calls_++] = call.substr(0, kMostPositionText + 1);
    if (newest_calls_.size() > kCallsTold) newest_calls_.erase(newest_calls_.begin());
  }
  uint64_t calls() const override {
    std::lock_guard lock(mutex_);
    return calls_digest_;
  }
  void WatchStops(std::function<bool()> stops) override {
    std::lock_guard lock(stops_mutex_);
    stops_ = std::move(stops);
  }

  void Abort(const absl::Status& why) override {
    if (why.ok() || !Stop(why)) return;
    Note(Coded(why.code(), absl::StrCat(RankName(rank(), world()), " failed: ", std::string(why.message()))));
  }

  // Every call fails from here on; false where that is so already. `note`: what the beats tell the store,
  // which may take a while to answer; whoever wakes up here and takes leave waits for their last round.
  bool Stop(const absl::Status& why, const std::string& note = "") {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return false;
    failure_ = why;
    if (!closing_ && to_note_.empty()) to_note_ = note;
    for (const WatchedExchange* exchange : under_way_) {
      for (const WatchedExchange::Peer& peer : exchange->peers_) {
        peer.receives->GiveUp();
        peer.sends->GiveUp();
      }
    }
    return true;
  }

  absl::Status failure() override {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  // Rank `peer` cannot be reached any more. What is known of the cause, and from now on everybody's answer.
  absl::Status Lost(int peer, const std::string& what) {
    RETURN_IF_ERROR(failure());
    const std::string why = FirstLine(what);
    std::string text = absl::StrCat(RankName(peer, world()), " has gone");
    // The mesh's own words help only where the connection was not simply closed.
    if (why.find("closed by peer") == std::string::npos && why.find("reset by peer") == std::string::npos) {
      absl::StrAppend(&text, " (", why.substr(std::min(why.size(), why.find("] ") + 2)), ")");
    }
    return Fail(text);
  }

  // A failure that is not this rank's own: the first that anybody wrote down is the cause of the others.
  absl::Status Fail(const std::string& text) {
    std::string noted = Noted();
    if (noted.empty()) {
      noted = Coded(absl::StatusCode::kUnavailable, text);
      Note(noted);
    }
    (void)Stop(Others(noted));
    return failure();
  }

  absl::Status Register(WatchedExchange* exchange) {
    std::lock_guard lock(mutex_);
    RETURN_IF_ERROR(failure_);
    exchange->number_ = begun_[static_cast<size_t>(exchange->channel_)]++;  // alike on all ranks
    under_way_.insert(exchange);
    return absl::OkStatus();
  }
  void Deregister(WatchedExchange* exchange) {
    std::lock_guard lock(mutex_);
    under_way_.erase(exchange);
  }
  void Waits(WatchedExchange* exchange, int peer) {
    std::lock_guard lock(mutex_);
    if (exchange->waits_since_ == kNever) exchange->waits_since_ = Clock::now();
    exchange->waits_for_ = peer;
  }

 private:
  // What was noted of a failure, as everybody's answer.
  absl::Status Others(const std::string& noted) const {
    const size_t space = std::min(noted.find(' '), noted.size());
    int number = 0;
    const bool coded = absl::SimpleAtoi(noted.substr(0, space), &number);
    const absl::StatusCode code =
        CodeForAll(coded ? static_cast<absl::StatusCode>(number) : absl::StatusCode::kUnavailable);
    const std::string text = OneLine(
        coded ? std::string_view(noted).substr(std::min(space + 1, noted.size())) : noted, kMostNoted);
    if (code != absl::StatusCode::kUnavailable) return {code, text};
    return absl::UnavailableError(
        absl::StrCat(text, "; the last commit of all ranks stands: go on from it with `resume`"));
  }

  // What others still have to read must not be lost by closing: everybody is done when everybody says so.
  // Who fails now has already been told, or will be by the run.
  void TakeLeave() {
    Enter(kEnd);
    std::vector<std::byte> said(static_cast<size_t>(world()));
    std::vector<const void*> send(said.size(), said.data() + rank());
    std::vector<void*> receive;
    for (std::byte& place : said) receive.push_back(&place);
    absl::StatusOr<std::unique_ptr<Exchange>> last = Begin(Channel::kSetup, {.name = kEnd}, send, receive, 1);
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    if (last.ok()) (void)(*last)->Wait();
  }

  static std::chrono::milliseconds InMilliseconds(double seconds) {
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
  }
  std::chrono::milliseconds Meeting() const { return InMilliseconds(options_.meeting_seconds); }

  // The ranks that have not come, of which `first` is the first: "rank 2 of 3", "ranks 1, 2 of 3".
  std::string Missing(int first) {
    std::vector<int> missing = {first};
    try {
      for (int k = first + 1; k < world(); ++k) {
        if (!store_->Has(Key(absl::StrCat("here/", k)))) missing.push_back(k);
      }
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): rank 0, who has the list, has given up
    }
    if (missing.size() == 1) return RankName(first, world());
    return absl::StrCat("ranks ", absl::StrJoin(missing, ", "), " of ", world());
  }

  absl::Status Meet() {
    // Meshes write to connections that another rank may have closed; they look at what write returns.
    if (struct sigaction now{}; sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
      (void)signal(SIGPIPE, SIG_IGN);
    const RankEnvironment& env = environment();
    const int port = env.master_port + (!env.agent_is_master ? 0 : env.master_port < 65535 ? 1 : -1);
    const std::string where = absl::StrCat(env.master_address, ":", port);
    absl::StatusOr<RankSecret> secret = RankSecret::Of(secret_);
    if (!secret.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(secret.status().message()), "; ", secret_way_));
    }
    ASSIGN_OR_RETURN(std::string address, OwnAddress(env.master_address, port));
    address_ = address;
    try {
      if (store_ == nullptr)
        store_ =
            std::make_shared<TcpStore>(env.master_address, port, /*serves=*/rank() == 0, Meeting(), *secret);
    } catch (const RefusedConnection&) {
      return absl::InvalidArgumentError(
          absl::StrCat(RankName(rank(), world()), " and what serves at ", where,
                       " (MASTER_ADDR, MASTER_PORT) do not know one secret: ", secret_way_));
    } catch (const std::exception& error) {
      const std::string why = FirstLine(error.what());
      return absl::UnavailableError(rank() == 0 ? absl::StrCat("cannot wait for the other ranks at ", where,
                                                               ": ", why, "; another MASTER_PORT may be free")
                                                : absl::StrCat("rank 0 was not there at ", where,
                                                               " (MASTER_ADDR, MASTER_PORT) within ",
                                                               options_.meeting_seconds, " s: ", why));
    }
    if (store_->Add(Key(absl::StrCat("came/", rank())), 1) > 1) {
      return absl::InvalidArgumentError(absl::StrCat("two processes at ", where, " say that they are ",
                                                     RankName(rank(), world()),
                                                     ": each has a RANK of its own"));
    }
    store_->Set(BeatKey(rank()), "{}");
    store_->Set(Key(absl::StrCat("here/", rank())), std::to_string(world()));
    const auto deadline = Clock::now() + Meeting();
    for (int k = 0; k < world(); ++k) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      const std::string key = Key(absl::StrCat("here/", k));
      try {
        store_->Wait(key, std::max(left, std::chrono::milliseconds(1)));
      } catch (const std::exception&) {
        if (Clock::now() + std::chrono::seconds(1) < deadline && rank() > 0)
          return absl::UnavailableError(absl::StrCat(RankName(0, world()), " has gone"));
        std::string text =
            absl::StrCat(Missing(k), " did not come to ", where, " within ", options_.meeting_seconds, " s");
        if (const uint64_t refused = store_->refused(); refused > 0) {
          absl::StrAppend(&text, "; ", refused,
                          " connections were refused, which did not know the secret of ",
                          "this run: ", secret_way_);
        }
        return absl::UnavailableError(text);
      }
      if (const std::string theirs = store_->Get(key); theirs != std::to_string(world())) {
        return absl::InvalidArgumentError(absl::StrCat("rank ", k, " was started as one of ", OneLine(theirs),
                                                       ", ", RankName(rank(), world()),
                                                       ": all need one WORLD_SIZE"));
      }
    }
    // All are there: who does not answer from here on is missed like later on.
    seen_.assign(static_cast<size_t>(world()), Clock::now());
    answered_ = Clock::now();
    beats_ = std::thread([this] { Beat(); });
    watch_ = std::thread([this] { Watch(); });
    try {
      mesh_ = make_({.rank = rank(),
                     .world = world(),
                     .address = address_,
                     .store = store_.get(),
                     .prefix = Key("mesh/"),
                     .secret = &*secret,
                     .wait = Patience() + InMilliseconds(kSlackSeconds)});
    } catch (const std::exception& error) {
      RETURN_IF_ERROR(failure());
      if (const std::string noted = Noted(); !noted.empty()) return Others(noted);
      return absl::UnavailableError(absl::StrCat("not all ranks could be connected from ", address_,
                                                 " within ", options_.patience_seconds,
                                                 " s: ", FirstLine(error.what())));
    }
    connected_.store(true);
    return absl::OkStatus();
  }

  std::string BeatKey(int rank) const { return Key(absl::StrCat("beat/", rank)); }
  std::string Key(const std::string& name) const { return prefix_ + name; }

  // The store may be gone with its rank: then nothing is known, and nobody is told.
  std::string Noted() {
    try {
      if (store_ == nullptr || !store_->Has(Key(kFailedKey))) return "";
      return store_->Get(Key(kFailedKey));
    } catch (const std::exception&) {
      return "";
    }
  }
  void Note(const std::string& text) {
    try {
      if (store_ != nullptr && !store_->Has(Key(kFailedKey))) store_->Set(Key(kFailedKey), text);
    } catch (const std::exception&) {
      return;
    }
  }

  std::chrono::milliseconds Patience() const { return InMilliseconds(options_.patience_seconds); }
  double LongestWaitSeconds() const {
    return options_.longest_wait_seconds > 0
               ? options_.longest_wait_seconds
               : std::max(kLeastLongestWaitSeconds, kLongestWait * options_.patience_seconds);
  }
  std::chrono::milliseconds Interval() const {
    return std::min(std::chrono::milliseconds(1000), Patience() / 10);
  }

  // Leaves a sign of life, and looks for those of the others: rank 0 for everybody's, everybody for rank 0's.
  void Beat() {
    bool store_is_there = true;
    for (bool last = false; !last;) {
      last = Stopped();  // and once more for what is still to be told
      try {
        if (store_is_there) AskStore(/*only_tells=*/last);
      } catch (const RefusedByStore& error) {
        (void)Fail(absl::StrCat(RankName(rank(), world()), ": ", error.what()));
      } catch (const std::exception&) {
        store_is_there = false;  // it has gone with its rank: the connections tell
      }
      if (!last) LookForBrokenConnections();
    }
  }

  // What this rank is at, for rank 0.
  std::string Position() {
    std::lock_guard lock(mutex_);
    RankPosition position{.beat = ++beats_count_, .calls = newest_calls_, .begun = begun_, .ended = ended_};
    for (const WatchedExchange* exchange : under_way_) {
      position.exchanges[{static_cast<size_t>(exchange->channel_), exchange->number_}] = {
          .text = exchange->Text(), .calls = exchange->what_.calls};
    }
    return position.ToText();
  }

  // Does not return while the store's host does not answer.
  void AskStore(bool only_tells) {
    std::string to_note;
    {
      std::lock_guard lock(mutex_);
      to_note = std::exchange(to_note_, "");
    }
    if (!to_note.empty()) Note(to_note);
    if (only_tells) return;
    store_->Set(BeatKey(rank()), Position());
    std::vector<std::string> positions;
    for (int k = 0; k < (rank() == 0 ? world() : 1); ++k) {
      std::string position = store_->Get(BeatKey(k));
      std::lock_guard lock(mutex_);
      std::string& before = positions_[k];
      if (position != before) seen_[static_cast<size_t>(k)] = Clock::now();
      before = position;
      positions.push_back(std::move(position));
    }
    {
      std::lock_guard lock(mutex_);
      answered_ = Clock::now();
    }
    if (rank() == 0) Compare(positions);
    // Whoever waits for another rank than the one that failed learns of it here.
    if (const std::string noted = Noted(); !noted.empty()) (void)Stop(Others(noted));
  }

  // Ranks that are not at the same: what they wait for does not come.
  void Compare(const std::vector<std::string>& texts) {
    std::vector<RankPosition> positions;
    for (const std::string& text : texts) {
      absl::StatusOr<RankPosition> position = RankPosition::FromText(text);
      if (!position.ok()) return;  // not all beat yet
      positions.push_back(*std::move(position));
    }
    const std::optional<PositionDifference> differ = ComparePositions(positions, kEnd);
    if (!differ.has_value()) return;
    (void)Fail(absl::StrCat(RankName(static_cast<int>(differ->rank), world()), " is at ", differ->at,
                            " and rank ", differ->other, " at ",
                            differ->at == differ->other_at
                                ? absl::StrCat(differ->other_at, " after other calls")
                                : differ->other_at,
                            ": they do not do the same; give all ranks the same flags, data and calls"));
  }

  // Apart from it, because the store's own process may be the one that does not answer.
  void Watch() {
    while (!Waited(left_)) {
      int silent = -1;
      bool ending = stopping_.load();
      {
        std::lock_guard lock(mutex_);
        const auto since = Clock::now() - Patience();
        for (int k = 0; rank() == 0 && k < world(); ++k) {
          if (k != rank() && seen_[static_cast<size_t>(k)] < since) silent = k;
        }
        if (rank() != 0 && (answered_ < since || seen_[0] < since)) silent = 0;
        ending = ending || !failure_.ok();
      }
      if (!ending && silent < 0) LookForLongWaits();
      if (silent < 0 || (ending && (silent > 0 || rank() == 0))) continue;
      if (ending) {  // what this rank has to say is not worth waiting for ever
        ShutStore();
        return;
      }
      const std::string text = Coded(
          absl::StatusCode::kUnavailable,
          absl::StrCat(RankName(silent, world()), " has not answered for ", options_.patience_seconds, " s"));
      // What every call returns from here on. A note to rank 0 would wait for it too, as the beats do, and
      // everybody who asks for notes.
      (void)Stop(Others(text), silent == 0 ? "" : text);
      if (silent == 0) {
        ShutStore();
        return;
      }
    }
  }

  // Waits that have lasted for too long, though everybody gives signs of life. Who is asked to stop, or takes
  // leave, does not wait for longer than for one that is silent; but for what ends a run in order, commits
  // and checkpoints, whose writing takes one rank longer than another: a second signal ends that as well.
  void LookForLongWaits() {
    const auto now = Clock::now();
    std::string text;
    {
      std::lock_guard lock(stops_mutex_);
      if (stop_asked_ == kNever && stops_ && stops_()) stop_asked_ = now;
    }
    {
      std::lock_guard lock(mutex_);
      for (const WatchedExchange* exchange : under_way_) {
        if (exchange->waits_since_ == kNever) continue;
        const std::chrono::duration<double> waited = now - exchange->waits_since_;
        const bool ends = exchange->channel_ == Channel::kAgree || exchange->channel_ == Channel::kCheckpoint;
        const bool stops = !ends && stop_asked_ != kNever &&
                           now - std::max(stop_asked_, exchange->waits_since_) > Patience();
        const bool leaves = ended_ && waited > Patience();
        if (!stops && !leaves && waited.count() < LongestWaitSeconds()) continue;
        text = absl::StrCat(RankName(exchange->waits_for_, world()),
                            " gives signs of life, but did not come to ", exchange->Text(), " of ",
                            RankName(rank(), world()), " in ", static_cast<int64_t>(waited.count()), " s",
                            stops ? ", and this rank was asked to stop" : " (`rank_timeout`)");
      }
    }
    if (text.empty()) return;
    text = Coded(absl::StatusCode::kUnavailable, text);
    (void)Stop(Others(text), text);
  }

  // A broken connection that nobody waits at just now.
  void LookForBrokenConnections() {
    {
      std::lock_guard lock(mutex_);
      if (!failure_.ok() || closing_ || !connected_.load()) return;  // they may end from here on
    }
    for (int k = 0; k < world(); ++k) {
      if (k == rank()) continue;
      try {
        mesh_->Probe(k);
      } catch (const std::exception& error) {
        {
          std::lock_guard lock(mutex_);
          if (closing_) return;  // meanwhile
        }
        (void)Lost(k, error.what());  // what every call returns from here on
        return;
      }
    }
  }

  // Whoever waits for the store is told that it is gone.
  void ShutStore() const {
    if (store_ != nullptr) store_->Shut();
  }

  bool Stopped() { return Waited(stopping_); }
  bool Waited(const std::atomic<bool>& flag) {
    std::unique_lock lock(stop_mutex_);
    return stop_.wait_for(lock, Interval(), [&flag] { return flag.load(); });
  }

  // Rank 0 keeps the store a little longer after a failure, so that the others can read why.
  void Leave() {
    if (store_ == nullptr) return;
    try {
      store_->Add(Key("left"), 1);
      const auto deadline = Clock::now() + std::chrono::seconds(2);
      while (rank() == 0 && !failure().ok() && store_->Add(Key("left"), 0) < world() &&
             Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    } catch (const std::exception&) {
      return;
    }
  }

  const MeshMaker make_;
  const std::string kind_;
  const CommOptions options_;
  const std::string secret_, secret_way_, prefix_;
  std::string address_;
  std::shared_ptr<TcpStore> store_;
  std::unique_ptr<Mesh> mesh_;
  std::atomic<bool> connected_{false};

  mutable std::mutex mutex_;
  absl::Status failure_;                     // the first; everything fails with it from then on
  std::set<WatchedExchange*> under_way_;     // that somebody may be waiting for
  std::array<uint64_t, kChannels> begun_{};  // exchanges, by channel
  uint64_t calls_ = 0;                       // that were entered
  uint64_t calls_digest_ = 0;
  std::map<uint64_t, std::string> newest_calls_;  // by number
  bool closing_ = false, ended_ = false;          // the latter: nothing is begun any more
  std::string to_note_;                           // by the beats
  uint64_t beats_count_ = 0;
  std::map<int, std::string> positions_;  // [rank] as its last sign of life said
  std::vector<Clock::time_point> seen_;   // [rank] when that was
  Clock::time_point answered_;            // when the store last did

  std::mutex stops_mutex_;
  std::function<bool()> stops_;            // not called any more once another is set
  Clock::time_point stop_asked_ = kNever;  // of Watch

  std::mutex stop_mutex_;
  std::condition_variable stop_;
  std::atomic<bool> stopping_{false}, left_{false};
  std::thread beats_, watch_;
};

WatchedExchange::~WatchedExchange() { comm_->Deregister(this); }

absl::Status WatchedExchange::Wait() {
  for (const Peer& peer : peers_) {
    comm_->Waits(this, peer.rank);
    try {
      if (!peer.receives->Wait() || !peer.sends->Wait()) return comm_->failure();
    } catch (const std::exception& error) {
      return comm_->Lost(peer.rank, error.what());
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Comm>> ConnectOver(const MeshMaker& make, const std::string& kind,
                                                  const RankEnvironment& environment,
                                                  const WatchOver& options) {
  auto comm = std::make_unique<WatchedComm>(make, kind, environment, options);
  RETURN_IF_ERROR(comm->Connect());
  return comm;
}

}  // namespace penstock::zero
