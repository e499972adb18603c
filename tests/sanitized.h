// sanitized.h - whether this is a build with AddressSanitizer, some twenty times slower than
// others.
#pragma once

namespace crisp {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
constexpr bool kIsSanitized = __has_feature(address_sanitizer);
#else
constexpr bool kIsSanitized = false;
#endif

}  // namespace crisp
