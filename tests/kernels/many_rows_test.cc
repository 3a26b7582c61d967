#include "kernels/many_rows.h"

#include <algorithm>
#include <cmath>

#include "kernels/thread_pool.h"
#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::many_rows_test {
namespace {

struct Case {
  size_t rows, columns, outputs;
};

// What elements of the type hold after the values were put there, and their bytes.
std::vector<uint8_t> Store(DType type, std::vector<float>* values) {
  std::vector<uint8_t> bytes(values->size() * BytesPerElement(type));
  Convert(DType::kFp32, values->data(), type, bytes.data(), values->size());
  Convert(type, bytes.data(), DType::kFp32, values->data(), values->size());
  return bytes;
}

std::vector<float> Defined(const Case& c, const std::vector<float>& x, const std::vector<float>& w) {
  std::vector<float> y;
  for (size_t r = 0; r < c.rows; ++r) {
    for (size_t n = 0; n < c.outputs; ++n) {
      float sum = 0;
      for (size_t k = 0; k < c.columns; ++k) sum = std::fmaf(x[r * c.columns + k], w[n * c.columns + k], sum);
      y.push_back(sum);
    }
  }
  return y;
}

// With a gap behind each row of y, which stays as it is.
std::vector<float> Multiply(const Case& c, DType type, const std::vector<uint8_t>& x,
                            const ManyWeights& weights, DType y_type, ThreadPool* pool) {
  const size_t stride = c.outputs + 3, width = BytesPerElement(y_type);
  std::vector<uint8_t> y(c.rows * stride * width, 0xA5), scratch(ManyRowsScratch(c.rows, c.outputs));
  MultiplyManyRows({type, x.data(), c.rows, c.columns, c.columns}, weights, {y_type, y.data(), stride},
                   scratch.data(), pool);
  std::vector<float> all;
  for (size_t r = 0; r < c.rows; ++r) {
    std::vector<float> row(c.outputs);
    Convert(y_type, y.data() + r * stride * width, DType::kFp32, row.data(), c.outputs);
    all.insert(all.end(), row.begin(), row.end());
    for (size_t i = c.outputs * width; i < stride * width; ++i) EXPECT_EQ(y[r * stride * width + i], 0xA5);
  }
  return all;
}

const Case kCases[] = {{1, 1, 1},     {3, 7, 5},      {16, 33, 12},  {17, 256, 49},
                       {40, 300, 70}, {300, 520, 13}, {257, 65, 100}};

TEST(ManyRowsTest, HasTheBitsOfTheDefinitionAtEveryLevelHoweverItIsShared) {
  ThreadPool pool(3);
  for (const Case& c : kCases) {
    for (const DType x_type : {DType::kFp32, DType::kBf16}) {
      for (const DType w_type : {DType::kFp32, DType::kBf16, DType::kFp16}) {
        std::vector<float> x = Random(c.rows * c.columns, Values::kNormal, c.rows);
        std::vector<float> w = Random(c.outputs * c.columns, Values::kNormal, c.columns);
        const std::vector<uint8_t> x_bytes = Store(x_type, &x), w_bytes = Store(w_type, &w);
        std::vector<uint8_t> turned(w_bytes.size());
        const size_t width = BytesPerElement(w_type);
        for (size_t n = 0; n < c.outputs; ++n) {
          for (size_t k = 0; k < c.columns; ++k)
            std::memcpy(&turned[(k * c.outputs + n) * width], &w_bytes[(n * c.columns + k) * width], width);
        }
        std::vector<float> expected = Defined(c, x, w);
        for (const SimdLevel level : Levels()) {
          SCOPED_TRACE(testing::Message() << c.rows << " x " << c.columns << " x " << c.outputs << ", types "
                                          << static_cast<int>(x_type) << static_cast<int>(w_type)
                                          << ", level " << static_cast<int>(level));
          const AtLevel at(level);
          const ManyWeights plain = {w_type, std::nullopt, w_bytes.data(), c.outputs};
          ManyWeights by_columns = plain;
          by_columns.data = turned.data();
          by_columns.turned_stride = c.outputs;
          EXPECT_TRUE(SameFloats(Multiply(c, x_type, x_bytes, plain, DType::kFp32, nullptr), expected));
          EXPECT_TRUE(SameFloats(Multiply(c, x_type, x_bytes, plain, DType::kFp32, &pool), expected));
          EXPECT_TRUE(SameFloats(Multiply(c, x_type, x_bytes, by_columns, DType::kFp32, &pool), expected));
          std::vector<float> rounded = expected;
          Store(DType::kBf16, &rounded);
          EXPECT_TRUE(SameFloats(Multiply(c, x_type, x_bytes, plain, DType::kBf16, &pool), rounded));
        }
      }
    }
  }
}

TEST(ManyRowsTest, CodedRowsAreThoseThatTheyAreDecodedTo) {
  for (const WeightCode code :
       {WeightCode{8, 64}, WeightCode{4, 64}, WeightCode{4, 4096}, WeightCode{8, 32}}) {
    for (const Case& c : kCases) {
      std::vector<float> x = Random(c.rows * c.columns, Values::kNormal, 1);
      const std::vector<uint8_t> x_bytes = Store(DType::kBf16, &x);
      const size_t row_bytes = code.row_bytes(c.columns);
      std::vector<uint8_t> coded(c.outputs * row_bytes);
      std::vector<float> w;
      for (size_t n = 0; n < c.outputs; ++n) {
        std::vector<float> row = Random(c.columns, Values::kNormal, n);
        ASSERT_TRUE(EncodeWeights(code, row.data(), c.columns, &coded[n * row_bytes]));
        DecodeWeights(code, &coded[n * row_bytes], c.columns, DType::kFp32, row.data());
        w.insert(w.end(), row.begin(), row.end());
      }
      const std::vector<float> expected = Defined(c, x, w);
      for (const SimdLevel level : Levels()) {
        const AtLevel at(level);
        EXPECT_TRUE(SameFloats(Multiply(c, DType::kBf16, x_bytes,
                                        {DType::kBf16, code, coded.data(), c.outputs}, DType::kFp32, nullptr),
                               expected))
            << code.bits << " bits, groups of " << code.group << ", " << c.columns << " columns";
      }
    }
  }
}

TEST(ManyRowsTest, ARowHasItsBitsInAnyCompany) {
  const Case c = {300, 200, 50};
  std::vector<float> x = Random(c.rows * c.columns, Values::kNormal, 5),
                     w = Random(c.outputs * c.columns, Values::kNormal, 6);
  const std::vector<uint8_t> x_bytes = Store(DType::kFp32, &x), w_bytes = Store(DType::kFp32, &w);
  const ManyWeights weights = {DType::kFp32, std::nullopt, w_bytes.data(), c.outputs};
  const std::vector<float> all = Multiply(c, DType::kFp32, x_bytes, weights, DType::kFp32, nullptr);
  for (const size_t row : {size_t{0}, size_t{17}, size_t{255}, size_t{299}}) {
    const size_t row_bytes = c.columns * 4;
    const std::vector<uint8_t> alone(x_bytes.begin() + static_cast<ptrdiff_t>(row * row_bytes),
                                     x_bytes.begin() + static_cast<ptrdiff_t>((row + 1) * row_bytes));
    const std::vector<float> one =
        Multiply({1, c.columns, c.outputs}, DType::kFp32, alone, weights, DType::kFp32, nullptr);
    EXPECT_TRUE(SameFloats(one.data(), all.data() + row * c.outputs, c.outputs)) << "row " << row;
  }
}

}  // namespace
}  // namespace penstock::kernels::many_rows_test
