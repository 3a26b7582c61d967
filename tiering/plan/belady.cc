#include "tiering/plan/belady.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "base/index.h"

namespace penstock::tiering {
namespace {

constexpr size_t kNever = std::numeric_limits<size_t>::max();

// Items that are alike, and how many of them.
struct Kind {
  int64_t bytes = 0;
  double saves = 0;
  std::vector<size_t> members;
};

// Depth first over kinds by falling density; a branch is cut where even a fraction of what is left could not
// reach the best.
class Search {
 public:
  explicit Search(const std::vector<Kind>& kinds) : kinds_(kinds), counts_(kinds.size(), 0) {}

  std::vector<int64_t> Run(int64_t budget) {
    Visit(0, budget, 0);
    return best_;
  }

 private:
  // The most that kinds from `from` on can add: the densest first, the last of them in part.
  double Bound(size_t from, int64_t left) const {
    double sum = 0;
    for (size_t k = from; k < kinds_.size() && left > 0; ++k) {
      const auto count = static_cast<int64_t>(kinds_[k].members.size());
      const int64_t whole = std::min(count, left / kinds_[k].bytes);
      sum += static_cast<double>(whole) * kinds_[k].saves;
      left -= whole * kinds_[k].bytes;
      if (whole < count) {
        sum += kinds_[k].saves * static_cast<double>(left) / static_cast<double>(kinds_[k].bytes);
        break;
      }
    }
    return sum;
  }

  void Visit(size_t kind, int64_t left, double saved) {
    if (best_.empty() || saved > best_saved_) {
      best_saved_ = saved;
      best_ = counts_;
    }
    // The first way down, as many of the densest as fit, is the greedy set: it is always walked to its end.
    if (kind == kinds_.size() || (nodes_++ > kMostNodes && walked_down_)) return;
    if (saved + Bound(kind, left) <= best_saved_ * (1 + 1e-12)) return;
    const Kind& k = kinds_[kind];
    for (int64_t n = std::min(static_cast<int64_t>(k.members.size()), left / k.bytes); n >= 0; --n) {
      counts_[kind] = n;
      Visit(kind + 1, left - n * k.bytes, saved + static_cast<double>(n) * k.saves);
      walked_down_ = true;
      if (nodes_ > kMostNodes) break;
    }
    counts_[kind] = 0;
  }

  const std::vector<Kind>& kinds_;
  std::vector<int64_t> counts_, best_;
  double best_saved_ = 0;
  int64_t nodes_ = 0;
  bool walked_down_ = false;
};

}  // namespace

Replacement BeladyMisses(const std::vector<int>& trace, int items, int capacity, int passes,
                         bool keeps_previous) {
  Replacement result;
  result.misses_of.assign(At(items), 0);
  const size_t length = trace.size();
  const size_t counted = length * At(passes);
  // The future beyond what is counted: nothing for a trace that stands alone, else one more pass.
  const size_t known = passes > 1 ? counted + length : counted;
  std::vector<size_t> next(known, kNever), seen(At(items), kNever);
  for (size_t i = known; i-- > 0;) {
    size_t& last = seen[At(trace[i % length])];
    next[i] = last;
    last = i;
  }
  struct Held {
    int item;
    size_t next_use;
  };
  std::vector<Held> cache;
  for (size_t i = 0; i < counted; ++i) {
    const int item = trace[i % length];
    const auto held = std::find_if(cache.begin(), cache.end(), [&](const Held& h) { return h.item == item; });
    if (held != cache.end()) {
      held->next_use = next[i];
      continue;
    }
    if (i >= counted - length) {
      ++result.misses;
      ++result.misses_of[At(item)];
    }
    if (cache.size() < At(capacity)) {
      cache.push_back({item, next[i]});
      continue;
    }
    const int previous = keeps_previous ? trace[(i + length - 1) % length] : -1;
    *std::max_element(cache.begin(), cache.end(), [previous](const Held& a, const Held& b) {
      return std::pair(a.item != previous, a.next_use) < std::pair(b.item != previous, b.next_use);
    }) = {item, next[i]};
  }
  return result;
}

std::vector<char> ChooseResident(const std::vector<Keepable>& items, int64_t budget, bool spread) {
  std::vector<char> stays(items.size(), 0);
  std::map<std::pair<int64_t, double>, Kind> alike;
  for (size_t i = items.size(); i-- > 0;) {
    const Keepable& item = items[i];
    if (item.saves <= 0 || item.bytes > budget) continue;
    if (item.bytes <= 0) {
      stays[i] = 1;  // costs nothing
      continue;
    }
    Kind& kind = alike[{item.bytes, item.saves}];
    kind.bytes = item.bytes;
    kind.saves = item.saves;
    kind.members.push_back(i);
  }
  std::vector<Kind> kinds;
  kinds.reserve(alike.size());
  for (auto& [key, kind] : alike) kinds.push_back(std::move(kind));
  std::sort(kinds.begin(), kinds.end(), [](const Kind& a, const Kind& b) {
    const double left = a.saves * static_cast<double>(b.bytes),
                 right = b.saves * static_cast<double>(a.bytes);
    return left != right ? left > right : a.bytes > b.bytes;
  });
  if (budget <= 0 || kinds.empty()) return stays;
  const std::vector<int64_t> counts = Search(kinds).Run(budget);
  for (size_t k = 0; k < kinds.size(); ++k) {
    const std::vector<size_t>& members = kinds[k].members;
    const auto count = static_cast<size_t>(counts[k]);
    // Members are listed from the last on; evenly: number m is one of `count` among all.
    const size_t all = members.size();
    for (size_t m = 0; m < all; ++m) {
      if (spread ? (m + 1) * count / all > m * count / all : m < count) stays[members[m]] = 1;
    }
  }
  return stays;
}

}  // namespace penstock::tiering
