#include "rng_tape.h"

#include <algorithm>
#include <mutex>

#include <ATen/core/DistributionsHelper.h>

#include "mt19937_jump.h"

namespace torchext {

using at::CPUGeneratorImpl;
using at::Generator;

namespace {

CPUGeneratorImpl& cpuImpl(const Generator& generator) {
  return *generator.get<CPUGeneratorImpl>();
}

// The caller holds the generator's mutex.
GeneratorState readState(CPUGeneratorImpl& impl) {
  return {impl.engine().data(), impl.next_float_normal_sample(), impl.next_double_normal_sample()};
}

void writeState(CPUGeneratorImpl& impl, const GeneratorState& state) {
  at::mt19937 engine;
  engine.set_data(state.engine);
  impl.set_engine(engine);
  impl.set_next_float_normal_sample(state.next_float_normal);
  impl.set_next_double_normal_sample(state.next_double_normal);
}

void skipLocked(CPUGeneratorImpl& impl, std::uint64_t draws) {
  at::mt19937 engine = impl.engine();
  at::mt19937_data_pod data = engine.data();
  advance(data, draws);
  engine.set_data(data);
  impl.set_engine(engine);
}

bool isSame(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b) {
  return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.seeded_ == b.seeded_ &&
         a.state_ == b.state_;
}

// Where this thread last left a generator. While the next operator finds it there, its position is told by the same
// base; when somebody has moved or seeded the generator meanwhile, the tape starts anew.
struct LastSeen {
  std::shared_ptr<const GeneratorState> base;
  std::uint64_t draws = 0;
  at::mt19937_data_pod engine{};

  bool fits(const GeneratorState& state) const {
    return base != nullptr && isSame(engine, state.engine) && base->next_float_normal == state.next_float_normal &&
           base->next_double_normal == state.next_double_normal;
  }
};

thread_local LastSeen last_seen;

TapePosition positionLocked(CPUGeneratorImpl& impl) {
  const GeneratorState state = readState(impl);
  if (!last_seen.fits(state)) {
    last_seen = {std::make_shared<const GeneratorState>(state), 0, state.engine};
  }
  return {last_seen.base, last_seen.draws, std::nullopt};
}

}  // namespace

TapePosition tapePosition(Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return positionLocked(cpuImpl(generator));
}

TapePosition takeDraws(Generator generator, std::uint64_t draws) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  CPUGeneratorImpl& impl = cpuImpl(generator);
  TapePosition position = positionLocked(impl);
  position.length = draws;
  skipLocked(impl, draws);
  last_seen.draws += draws;
  last_seen.engine = impl.engine().data();
  return position;
}

TapePosition takeNormals(Generator generator, std::uint64_t count) {
  constexpr std::uint64_t kDrawsOfPair = 4;  // two doubles, two draws each
  const std::lock_guard<std::mutex> lock(generator.mutex());
  CPUGeneratorImpl& impl = cpuImpl(generator);
  TapePosition position = positionLocked(impl);
  if (count > 0 && impl.next_double_normal_sample().has_value()) {
    impl.set_next_double_normal_sample(std::nullopt);
    count -= 1;
  }
  skipLocked(impl, count / 2 * kDrawsOfPair);
  if (count % 2 == 1) {
    const at::normal_distribution<double> normal(0, 1);
    normal(&impl);  // keeps the second value of the pair
  }
  return position;
}

TapeReader::Cursor* TapeReader::nearest(const TapePosition& position) {
  Cursor* found = nullptr;
  for (Cursor& cursor : cursors_) {
    const bool is_on_the_way = cursor.position.base == position.base && cursor.position.draws <= position.draws;
    if (is_on_the_way && (found == nullptr || found->position.draws < cursor.position.draws)) {
      found = &cursor;
    }
  }
  return found;
}

TapeReader::Cursor& TapeReader::leastRecentlyUsed() {
  return *std::min_element(cursors_.begin(), cursors_.end(),
                           [](const Cursor& a, const Cursor& b) { return a.last_use < b.last_use; });
}

// A cursor that would have to move is left for the operators that go on there, and another one takes its place on the
// way, unless all others have been used since.
const Generator& TapeReader::moveTo(const TapePosition& position) {
  Cursor* start = nearest(position);
  const bool goes_on = start != nullptr && start->position.draws == position.draws;
  Cursor& cursor = goes_on ? *start : leastRecentlyUsed();
  CPUGeneratorImpl& impl = cpuImpl(cursor.generator);
  if (&cursor != start) {
    writeState(impl, start == nullptr ? *position.base : readState(cpuImpl(start->generator)));
    cursor.position = {position.base, start == nullptr ? 0 : start->position.draws, std::nullopt};
  }
  skipLocked(impl, position.draws - cursor.position.draws);
  cursor.position =
      position.length ? TapePosition{position.base, position.draws + *position.length, std::nullopt} : TapePosition{};
  cursor.last_use = ++uses_;
  return cursor.generator;
}

DefaultGeneratorAt::DefaultGeneratorAt(const TapePosition& position) {
  Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  CPUGeneratorImpl& impl = cpuImpl(generator);
  previous_ = readState(impl);
  writeState(impl, *position.base);
  skipLocked(impl, position.draws);
}

DefaultGeneratorAt::~DefaultGeneratorAt() {
  Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  writeState(cpuImpl(generator), previous_);
}

}  // namespace torchext
