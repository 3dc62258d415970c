#include "tape.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include "../../../libraries/support/sizes.h"
#include "../../fake/calls/op_traits.h"
#include "../../hooks/hooks.h"

namespace torchext {

void setTape(c10::DeviceType device, const Tape& tape) {
  hooks().tapes.at(static_cast<std::size_t>(device)) = &tape;
}

const Tape& tapeOf(c10::DeviceType device) {
  const Tape* tape = hooks().tapes.at(static_cast<std::size_t>(device));
  return tape == nullptr ? copiedTape() : *tape;
}

at::Generator defaultGenerator(c10::Device device) {
  if (device.is_meta()) {
    return {};
  }
  try {
    return at::globalContext().defaultGenerator(device);
  } catch (const c10::Error&) {  // this device type has no generators
    return {};
  }
}

PrivateGenerators& TapeReader::generatorsOf(const Tape& tape) {
  auto& generators = generators_[&tape];
  if (generators == nullptr) {
    generators = tape.makeGenerators();
  }
  return *generators;
}

void callWithGenerator(const c10::OperatorHandle& op, torch::jit::Stack& stack, const at::Generator& generator) {
  if (!hooks().replay_fill(op, stack, generator)) {
    stack[toSize(generatorArgument(op.schema()))] = generator;
    op.callBoxed(stack);
  }
}

namespace {

class CopiedPosition final : public TapePosition {
 public:
  explicit CopiedPosition(at::Generator copy) : TapePosition{copiedTape(), copy.device()}, copy_{std::move(copy)} {}

  std::uint64_t draws() const noexcept override {
    return 0;
  }

  void place(at::Generator generator) const override {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state());
  }

  std::string identity(TapeReader& /*reader*/) const override {
    const at::Tensor bytes = state().contiguous();
    return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
  }

  at::Generator copy() const {
    return copy_.clone();
  }

 private:
  at::Tensor state() const {
    return at::Tensor(copy_.unsafeGetGeneratorImpl()->get_state());
  }

  at::Generator copy_;
};

class Copies final : public PrivateGenerators {
 public:
  const at::Generator& moveTo(const TapePosition& position, bool /*draws*/) override {
    last_ = static_cast<const CopiedPosition&>(position).copy();
    return last_;
  }

 private:
  at::Generator last_;
};

class CopiedTape final : public Tape {
 public:
  std::shared_ptr<TapePosition> positionOf(at::Generator generator) const override {
    const std::lock_guard lock(generator.mutex());
    return std::make_shared<CopiedPosition>(generator.clone());
  }

  TapePositionPtr takeDrawsOf(const c10::OperatorHandle& /*op*/,
                              const torch::jit::Stack& /*stack*/,
                              const at::Generator& /*generator*/) const override {
    return nullptr;
  }

  std::unique_ptr<PrivateGenerators> makeGenerators() const override {
    return std::make_unique<Copies>();
  }
};

}  // namespace

const Tape& copiedTape() {
  static const CopiedTape tape;
  return tape;
}

}  // namespace torchext
