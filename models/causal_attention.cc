#include "models/causal_attention.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>

namespace penstock::models {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Calls visit(first, rows, seen) for the blocks of queries in order: rows [first, first + rows) see the first
// `seen` keys.
template <typename Visit>
void ForEachBlock(int64_t length, Visit visit) {
  for (int64_t first = 0; first < length; first += kQueryRows) {
    const int64_t rows = std::min(kQueryRows, length - first);
    visit(first, rows, first + rows);
  }
}

// Rows [first, first + rows) of every head, those of the heads that share keys one after the other:
// [key heads, group * rows, depth] of [key heads, group, length, depth]; without groups a view.
Tensor Rows(const Tensor& x, int64_t first, int64_t rows) {
  const Tensor some = x.narrow(2, first, rows);
  return some.size(1) == 1 ? some.squeeze(1)
                           : some.reshape({some.size(0), some.size(1) * rows, some.size(3)});
}
// Puts such rows back.
void PutRows(const Tensor& rows, int64_t first, const Tensor& to) {
  const int64_t group = to.size(1), count = rows.size(1) / group;
  to.narrow(2, first, count).copy_(rows.view({to.size(0), group, count, to.size(3)}));
}

// [key heads, group * rows, seen] of queries scaled already, the last `rows` of those who see these keys.
Tensor Probabilities(const Tensor& queries, const Tensor& keys, int64_t group) {
  const int64_t rows = queries.size(1) / group, seen = keys.size(1);
  Tensor scores = torch::bmm(queries, keys.transpose(1, 2));
  Tensor future = torch::ones({rows, rows}, scores.options().dtype(torch::kBool)).triu_(/*diagonal=*/1);
  if (group > 1) future = future.repeat({group, 1});
  // A view of all of it would cost autograd a copy of the gradient.
  const Tensor among = seen == rows ? scores : scores.narrow(2, seen - rows, rows);
  among.masked_fill_(future, -std::numeric_limits<double>::infinity());
  return torch::softmax(scores, -1);
}

// By autograd, which keeps the probabilities. `q` has the rows of the heads that share keys one after the
// other.
Tensor InOnePiece(const Tensor& q, const Tensor& k, const Tensor& v, int64_t group, double dropout) {
  const Tensor p = Probabilities(q, k, group);
  return torch::bmm(dropout > 0 ? torch::dropout(p, dropout, /*train=*/true) : p, v);
}

// What stays of probabilities of this shape, a byte each.
Tensor DrawKept(const Tensor& p, double dropout) {
  return torch::empty(p.sizes(), p.options().dtype(torch::kBool)).bernoulli_(1 - dropout);
}
Tensor Thinned(const Tensor& p, const Tensor& kept, double dropout) { return p * kept * (1 / (1 - dropout)); }

// The queries come scaled, so that their gradient needs no factor here, and as [key heads, group, length,
// depth].
class ScaledAttention : public torch::autograd::Function<ScaledAttention> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        double dropout) {
    const int64_t group = q.size(1);
    Tensor out = group == 1 ? torch::empty_like(v).unsqueeze(1)
                            : torch::empty({q.size(0), group, q.size(2), v.size(2)}, v.options());
    variable_list saved = {q, k, v};
    ForEachBlock(q.size(2), [&](int64_t first, int64_t rows, int64_t seen) {
      Tensor p = Probabilities(Rows(q, first, rows), k.narrow(1, 0, seen), group);
      if (dropout > 0) {
        saved.push_back(DrawKept(p, dropout));
        p = Thinned(p, saved.back(), dropout);
      }
      PutRows(torch::bmm(p, v.narrow(1, 0, seen)), first, out);
    });
    context->save_for_backward(saved);
    context->saved_data["dropout"] = dropout;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const double dropout = context->saved_data["dropout"].toDouble();
    const int64_t group = q.size(1);
    const Tensor& out_gradient = gradients[0];
    const auto sums = k.options().dtype(torch::promote_types(k.scalar_type(), torch::kFloat32));
    Tensor dq = torch::empty_like(q), dk = torch::zeros(k.sizes(), sums), dv = torch::zeros(v.sizes(), sums);
    ForEachBlock(q.size(2), [&](int64_t first, int64_t rows, int64_t seen) {
      const Tensor queries = Rows(q, first, rows), keys = k.narrow(1, 0, seen);
      const Tensor gradient = Rows(out_gradient, first, rows);
      const Tensor p = Probabilities(queries, keys, group);
      Tensor dp = torch::bmm(gradient, v.narrow(1, 0, seen).transpose(1, 2));
      if (dropout > 0) {
        const Tensor& kept = saved[static_cast<size_t>(3 + first / kQueryRows)];
        dv.narrow(1, 0, seen).add_(torch::bmm(Thinned(p, kept, dropout).transpose(1, 2), gradient));
        dp = Thinned(dp, kept, dropout);
      } else {
        dv.narrow(1, 0, seen).add_(torch::bmm(p.transpose(1, 2), gradient));
      }
      const Tensor ds = at::_softmax_backward_data(dp, p, -1, p.scalar_type());
      dk.narrow(1, 0, seen).add_(torch::bmm(ds.transpose(1, 2), queries));
      PutRows(torch::bmm(ds, keys), first, dq);
    });
    return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type()), Tensor()};
  }
};

}  // namespace

Tensor CausalAttention(const Tensor& q, const Tensor& k, const Tensor& v, double scale, double dropout) {
  const int64_t length = q.size(1), depth = q.size(2), key_heads = k.size(0), group = q.size(0) / key_heads;
  const Tensor scaled = q * scale;
  if (length <= kWholeLength) {
    const Tensor joined = group == 1 ? scaled : scaled.reshape({key_heads, group * length, depth});
    const Tensor out = InOnePiece(joined, k, v, group, dropout);
    return group == 1 ? out : out.view({q.size(0), length, v.size(2)});
  }
  const Tensor grouped = group == 1 ? scaled.unsqueeze(1) : scaled.reshape({key_heads, group, length, depth});
  const Tensor out = ScaledAttention::apply(grouped, k, v, dropout);
  return group == 1 ? out.squeeze(1) : out.reshape({q.size(0), length, v.size(2)});
}

Tensor AttentionOfLast(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  const int64_t rows = q.size(1), key_heads = k.size(0), group = q.size(0) / key_heads;
  const Tensor scaled = (q * scale).reshape({key_heads, group * rows, q.size(2)});
  const Tensor out = InOnePiece(scaled, k, v, group, /*dropout=*/0);
  return out.reshape({q.size(0), rows, v.size(2)});
}

}  // namespace penstock::models
