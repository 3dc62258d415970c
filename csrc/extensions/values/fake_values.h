#pragma once

namespace torchext {

// Answers the hook `FakeValues`, and handles calls that read known values. Call while the library is loaded.
void registerFakeValues();

}  // namespace torchext
