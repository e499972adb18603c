// Mapping a file, and replacing one as a whole or not at all.
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "files/atomic_file.h"
#include "files/mapped_file.h"
#include "tensor_files.h"

namespace crisp::files {
namespace {

TEST(MappedFile, RefusesWhatIsNoFile) {
  const Folder folder;
  EXPECT_THAT(message_of([&] { MappedFile(folder.file("none")); }),
              HasSubstr("none: cannot be opened: No such file"));
  EXPECT_THAT(message_of([&] { MappedFile(folder.path().string()); }),
              HasSubstr("is not a regular file"));
  put(folder.file("empty"), "");
  EXPECT_THAT(message_of([&] { MappedFile(folder.file("empty")); }), HasSubstr("is empty"));
  ASSERT_EQ(mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { MappedFile(folder.file("pipe")); }),
              HasSubstr("is not a regular file"));
}

TEST(AtomicFile, ReplacesAsAWholeOrNotAtAll) {
  const Folder folder;
  const std::string path = folder.file("out");
  put(path, "old");
  {
    AtomicFile file(path);
    file.write(std::as_bytes(std::span("new", 3)));
    EXPECT_EQ(get(path), "old");
  }
  EXPECT_EQ(get(path), "old");
  EXPECT_EQ(folder.num_entries(), 1u);
  AtomicFile file(path);
  file.write(std::as_bytes(std::span("new", 3)));
  file.commit();
  EXPECT_EQ(get(path), "new");
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(AtomicFile, FollowsASymbolicLink) {
  const Folder folder;
  put(folder.file("real"), "old");
  fs::create_symlink("real", folder.file("link"));
  AtomicFile file(folder.file("link"));
  file.write(std::as_bytes(std::span("new", 3)));
  file.commit();
  EXPECT_TRUE(fs::is_symlink(folder.file("link")));
  EXPECT_EQ(get(folder.file("real")), "new");
}

TEST(AtomicFile, RefusesImpossibleTargets) {
  const Folder folder;
  EXPECT_THAT(message_of([&] { check_writable(folder.file("no/such/out")); }),
              HasSubstr("No such file or directory"));
  EXPECT_THAT(message_of([&] { check_writable(folder.path().string()); }),
              HasSubstr("not a regular file"));
  EXPECT_THAT(message_of([&] { check_writable(""); }), HasSubstr("name of the file"));
  put(folder.file("plain"), "x");
  EXPECT_THAT(message_of([&] { check_writable(folder.file("plain/out")); }),
              HasSubstr("cannot be written"));
}

// A file-size limit makes write() fail as a full disk does.
TEST(AtomicFile, FullDiskLeavesNothing) {
  const Folder folder;
  put(folder.file("out"), "old");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::vector<float> values(1000, 1.f);
  const NamedTensor tensor{"a", {ElementType::kF32, {1000}, bytes_of(values)}};
  const std::string message = message_of([&] {
    write_safetensors(folder.file("out"), {&tensor, 1});
  });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(message, HasSubstr("out: cannot be written: File too large"));
  EXPECT_EQ(get(folder.file("out")), "old");
  EXPECT_EQ(folder.num_entries(), 1u);
}

}  // namespace
}  // namespace crisp::files
