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

// [batch * heads, rows, seen] of queries scaled already, the last `rows` of those who see these keys.
Tensor Probabilities(const Tensor& queries, const Tensor& keys) {
  const int64_t rows = queries.size(1), seen = keys.size(1);
  Tensor scores = torch::bmm(queries, keys.transpose(1, 2));
  const Tensor future = torch::ones({rows, rows}, scores.options().dtype(torch::kBool)).triu_(/*diagonal=*/1);
  // A view of all of it would cost autograd a copy of the gradient.
  const Tensor among = seen == rows ? scores : scores.narrow(2, seen - rows, rows);
  among.masked_fill_(future, -std::numeric_limits<double>::infinity());
  return torch::softmax(scores, -1);
}

// By autograd, which keeps the probabilities.
Tensor InOnePiece(const Tensor& q, const Tensor& k, const Tensor& v, double dropout) {
  const Tensor p = Probabilities(q, k);
  return torch::bmm(dropout > 0 ? torch::dropout(p, dropout, /*train=*/true) : p, v);
}

// What stays of probabilities of this shape, a byte each.
Tensor DrawKept(const Tensor& p, double dropout) {
  return torch::empty(p.sizes(), p.options().dtype(torch::kBool)).bernoulli_(1 - dropout);
}
Tensor Thinned(const Tensor& p, const Tensor& kept, double dropout) { return p * kept * (1 / (1 - dropout)); }

// The queries come scaled, so that their gradient needs no factor here.
class ScaledAttention : public torch::autograd::Function<ScaledAttention> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        double dropout) {
    Tensor out = torch::empty_like(v);
    variable_list saved = {q, k, v};
    ForEachBlock(q.size(1), [&](int64_t first, int64_t rows, int64_t seen) {
      Tensor p = Probabilities(q.narrow(1, first, rows), k.narrow(1, 0, seen));
      if (dropout > 0) {
        saved.push_back(DrawKept(p, dropout));
        p = Thinned(p, saved.back(), dropout);
      }
      out.narrow(1, first, rows).copy_(torch::bmm(p, v.narrow(1, 0, seen)));
    });
    context->save_for_backward(saved);
    context->saved_data["dropout"] = dropout;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const double dropout = context->saved_data["dropout"].toDouble();
    const Tensor& out_gradient = gradients[0];
    const auto sums = k.options().dtype(torch::promote_types(k.scalar_type(), torch::kFloat32));
    Tensor dq = torch::empty_like(q), dk = torch::zeros(k.sizes(), sums), dv = torch::zeros(v.sizes(), sums);
    ForEachBlock(q.size(1), [&](int64_t first, int64_t rows, int64_t seen) {
      const Tensor queries = q.narrow(1, first, rows), keys = k.narrow(1, 0, seen);
      const Tensor gradient = out_gradient.narrow(1, first, rows);
      const Tensor p = Probabilities(queries, keys);
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
      dq.narrow(1, first, rows).copy_(torch::bmm(ds, keys));
    });
    return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type()), Tensor()};
  }
};

}  // namespace

Tensor CausalAttention(const Tensor& q, const Tensor& k, const Tensor& v, double scale, double dropout) {
  const Tensor scaled = q * scale;
  return q.size(1) <= kWholeLength ? InOnePiece(scaled, k, v, dropout)
                                   : ScaledAttention::apply(scaled, k, v, dropout);
}

}  // namespace penstock::models
