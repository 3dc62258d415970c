#include "tape.h"

#include <ATen/Context.h>

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

}  // namespace torchext
