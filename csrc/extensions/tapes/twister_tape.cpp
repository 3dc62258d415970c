#include "twister_tape.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/DistributionsHelper.h>

#include "../../libraries/fills/mt19937.h"
#include "../support/registrations.h"
#include "draws.h"

namespace torchext {

using at::CPUGeneratorImpl;
using at::Generator;

namespace {

CPUGeneratorImpl& cpuImpl(const Generator& generator) {
  return *generator.get<CPUGeneratorImpl>();
}

// The caller of the next functions holds the generator's mutex.

at::mt19937_data_pod engineOf(CPUGeneratorImpl& impl) {
  return impl.engine().data();
}

// The second values of Box-Muller pairs, which `at::normal_distribution` keeps in a generator for its next call.
struct KeptNormals {
  std::optional<float> of_float;
  std::optional<double> of_double;
};

KeptNormals keptNormals(CPUGeneratorImpl& impl) {
  return {impl.next_float_normal_sample(), impl.next_double_normal_sample()};
}

void setKeptNormals(CPUGeneratorImpl& impl, const KeptNormals& kept) {
  impl.set_next_float_normal_sample(kept.of_float);
  impl.set_next_double_normal_sample(kept.of_double);
}

void skipLocked(CPUGeneratorImpl& impl, std::uint64_t draws) {
  if (draws == 0) {
    return;
  }
  at::mt19937_data_pod data = engineOf(impl);
  advance(data, draws);
  setEngine(impl, data);
}

// The minimum distance between marks. Moving to the next mark takes less than 50 us.
constexpr std::uint64_t kDrawsBetweenMarks = std::uint64_t{1} << 16U;
constexpr std::uint32_t kMarksPerState = 4;

std::uint64_t nextTape() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// A place to start from, `draws` 32-bit draws after the beginning of a tape. Every few marks keep the generator's
// state, which takes 2.5 KB. From there the others are reached over the distances between them. advance()
// has computed most of these before.
class TapeMark {
 public:
  // The beginning of a new tape.
  explicit TapeMark(const at::mt19937_data_pod& engine)
      : tape_{nextTape()}, draws_{0}, engine_{std::make_unique<const at::mt19937_data_pod>(engine)} {}

  TapeMark(std::shared_ptr<const TapeMark> before, std::uint64_t draws, const at::mt19937_data_pod& engine)
      : tape_{before->tape_}, draws_{draws}, number_{before->number_ + 1} {
    if (number_ % kMarksPerState == 0) {
      engine_ = std::make_unique<const at::mt19937_data_pod>(engine);
    } else {
      before_ = std::move(before);
    }
  }

  // The number of the tape, from 1.
  std::uint64_t tape() const noexcept {
    return tape_;
  }
  std::uint64_t draws() const noexcept {
    return draws_;
  }

  at::mt19937_data_pod engine() const {
    if (engine_ != nullptr) {
      return *engine_;
    }
    at::mt19937_data_pod engine = before_->engine();
    advance(engine, draws_ - before_->draws_);
    return engine;
  }

  // Returns the state that was kept last.
  const at::mt19937_data_pod& keptEngine() const noexcept {
    return engine_ != nullptr ? *engine_ : before_->keptEngine();
  }

 private:
  std::uint64_t tape_;
  std::uint64_t draws_;
  std::uint32_t number_ = 0;
  // One of these is set.
  std::unique_ptr<const at::mt19937_data_pod> engine_;
  std::shared_ptr<const TapeMark> before_;
};

const Tape& twisterTape();

// The position `draws()` 32-bit draws after the beginning of a tape, with `kept` in the generator.
class TwisterPosition final : public TapePosition {
 public:
  TwisterPosition(std::shared_ptr<const TapeMark> mark, std::uint64_t draws, const KeptNormals& kept)
      : TapePosition{twisterTape(), c10::kCPU}, mark_{std::move(mark)}, draws_{draws}, kept_{kept} {}

  // The last mark before the position. Nearby positions share one.
  const TapeMark& mark() const noexcept {
    return *mark_;
  }

  const KeptNormals& kept() const noexcept {
    return kept_;
  }

  std::uint64_t draws() const noexcept override {
    return draws_;
  }

  void place(Generator generator) const override {
    const std::lock_guard lock(generator.mutex());
    CPUGeneratorImpl& impl = cpuImpl(generator);
    setEngine(impl, mark_->engine());
    skipLocked(impl, draws_ - mark_->draws());
    setKeptNormals(impl, kept_);
  }

  // The engine's next numbers identify its state. The state itself may have several forms at the same position.
  std::string identity(TapeReader& reader) const override {
    constexpr int kNumbers = 16;
    at::mt19937 engine;
    engine.set_data(engineOf(cpuImpl(reader.placedAt(*this))));
    std::string bytes;
    const auto add = [&bytes](auto number) {
      std::array<char, sizeof(number)> raw{};
      std::memcpy(raw.data(), &number, sizeof(number));
      bytes.append(raw.data(), raw.size());
    };
    for (int i = 0; i < kNumbers; ++i) {
      add(engine());
    }
    add(kept_.of_float.value_or(-1.0F));
    add(kept_.of_double.value_or(-1.0));
    return bytes;
  }

 private:
  std::shared_ptr<const TapeMark> mark_;
  std::uint64_t draws_;
  KeptNormals kept_;
};

// Where this thread last left the engine of a generator. If the next operator finds the engine in this state, it is on
// the same tape. If the generator was moved or seeded in between, a new tape begins.
struct LastPosition {
  std::shared_ptr<const TapeMark> mark;
  std::uint64_t draws = 0;
  at::mt19937_data_pod engine{};
};

thread_local LastPosition last_position;

// Returns the position of `impl`, whose state is `engine`.
std::shared_ptr<TwisterPosition> positionLocked(CPUGeneratorImpl& impl, const at::mt19937_data_pod& engine) {
  if (last_position.mark == nullptr || !areSame(last_position.engine, engine)) {
    last_position = {std::make_shared<const TapeMark>(engine), 0, engine};
  } else if (last_position.draws - last_position.mark->draws() >= kDrawsBetweenMarks) {
    last_position.mark = std::make_shared<const TapeMark>(last_position.mark, last_position.draws, engine);
  }
  return std::make_shared<TwisterPosition>(last_position.mark, last_position.draws, keptNormals(impl));
}

// Call it after the generator has moved by `draws` from the last position, to `engine`.
void recordMove(const at::mt19937_data_pod& engine, std::uint64_t draws) {
  last_position.draws += draws;
  last_position.engine = engine;
}

// Continuing where an operator ended costs nothing. There are several generators, because the draws of one tensor come
// from several ranges of the tape: a constructor draws for each tensor in turn, and `init_weights()` repeats that.
class Twisters final : public PrivateGenerators {
 public:
  // If the nearest cursor would have to move, it stays for operators that continue there, and the least recently used
  // cursor is moved instead (which may be the same one).
  const Generator& moveTo(const TapePosition& place, bool draws) override {
    const auto& position = static_cast<const TwisterPosition&>(place);
    Cursor* start = nearest(position);
    const bool goes_on = start != nullptr && start->draws == position.draws();
    Cursor& cursor = goes_on ? *start : leastRecentlyUsed();
    if (!cursor.generator.defined()) {
      cursor.generator = at::detail::createCPUGenerator();
    }
    CPUGeneratorImpl& impl = cpuImpl(cursor.generator);
    if (&cursor != start) {
      setEngine(impl, start == nullptr ? position.mark().engine() : engineOf(cpuImpl(start->generator)));
      cursor.draws = start == nullptr ? position.mark().draws() : start->draws;
    }
    skipLocked(impl, position.draws() - cursor.draws);
    setKeptNormals(impl, position.kept());
    cursor.tape = !draws || position.length() ? position.mark().tape() : 0;
    cursor.draws = position.draws() + (draws ? position.length().value_or(0) : 0);
    cursor.last_use = ++uses_;
    return cursor.generator;
  }

 private:
  struct Cursor {
    Generator generator;  // undefined until it is used
    // The position of the generator's engine. The tape is 0 if the position is unknown.
    std::uint64_t tape = 0;
    std::uint64_t draws = 0;
    std::uint64_t last_use = 0;
  };

  // Returns the nearest cursor between the mark of `position` and `position`, or null.
  Cursor* nearest(const TwisterPosition& position) {
    Cursor* found = nullptr;
    for (Cursor& cursor : cursors_) {
      const bool is_on_the_way = cursor.tape == position.mark().tape() && position.mark().draws() <= cursor.draws &&
                                 cursor.draws <= position.draws();
      if (is_on_the_way && (found == nullptr || found->draws < cursor.draws)) {
        found = &cursor;
      }
    }
    return found;
  }

  Cursor& leastRecentlyUsed() {
    return *std::min_element(cursors_.begin(), cursors_.end(),
                             [](const Cursor& a, const Cursor& b) { return a.last_use < b.last_use; });
  }

  std::array<Cursor, 4> cursors_;
  std::uint64_t uses_ = 0;
};

class TwisterTape final : public Tape {
 public:
  std::shared_ptr<TapePosition> positionOf(Generator generator) const override {
    const std::lock_guard lock(generator.mutex());
    CPUGeneratorImpl& impl = cpuImpl(generator);
    return positionLocked(impl, engineOf(impl));
  }

  TapePositionPtr takeDrawsOf(const c10::OperatorHandle& op,
                              const torch::jit::Stack& stack,
                              const Generator& generator) const override {
    return torchext::takeDrawsOf(op, stack, generator);
  }

  std::unique_ptr<PrivateGenerators> makeGenerators() const override {
    return std::make_unique<Twisters>();
  }
};

const TwisterTape kTwisterTape;

const Tape& twisterTape() {
  return kTwisterTape;
}

}  // namespace

void setEngine(CPUGeneratorImpl& impl, const at::mt19937_data_pod& data) {
  thread_local at::mt19937 engine;  // its constructor computes a state from a seed
  engine.set_data(data);
  impl.set_engine(engine);
}

const at::mt19937_data_pod* keptEngineOf(const TapePositionPtr& position) {
  return position != nullptr && &position->tape() == &kTwisterTape
             ? &static_cast<const TwisterPosition&>(*position).mark().keptEngine()
             : nullptr;
}

TapePositionPtr takeDraws(Generator generator, std::uint64_t draws) {
  const std::lock_guard lock(generator.mutex());
  CPUGeneratorImpl& impl = cpuImpl(generator);
  at::mt19937_data_pod engine = engineOf(impl);
  const auto position = positionLocked(impl, engine);
  position->setLength(draws);
  if (draws > 0) {
    advance(engine, draws);
    setEngine(impl, engine);
    recordMove(engine, draws);
  }
  return position;
}

TapePositionPtr takeNormals(Generator generator, std::uint64_t count) {
  constexpr std::uint64_t kDrawsOfPair = 4;  // two doubles, two draws each
  const std::lock_guard lock(generator.mutex());
  CPUGeneratorImpl& impl = cpuImpl(generator);
  at::mt19937_data_pod engine = engineOf(impl);
  const auto position = positionLocked(impl, engine);
  if (count > 0 && impl.next_double_normal_sample().has_value()) {
    impl.set_next_double_normal_sample(std::nullopt);
    count -= 1;
  }
  const std::uint64_t draws = (count + 1) / 2 * kDrawsOfPair;
  position->setLength(draws);
  if (count > 1) {
    advance(engine, count / 2 * kDrawsOfPair);
    setEngine(impl, engine);
  }
  if (count % 2 == 1) {
    const at::normal_distribution<double> normal(0, 1);
    normal(&impl);  // keeps the second value of the pair
    engine = engineOf(impl);
  }
  recordMove(engine, draws);
  return position;
}

void registerTwisterTape() {
  setTape(c10::kCPU, kTwisterTape);
}

}  // namespace torchext
