//! Files that cannot be run: refused with the kernel's own error number, and with a message that
//! names them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use dynasour_guest::image::{LoadError, Reason, check};

use crate::support::*;

/// The error of `check`, after its error number was compared with the kernel's for the same file.
fn refusal(path: &Path) -> LoadError {
    let error = check(path).expect_err("refused");
    let native = native_refusal(path, &[os(b"x")]);
    assert_eq!(native.expect_err("the kernel refuses"), error.errno(), "{error}");
    let message = error.to_string();
    assert!(
        message.starts_with(&format!("{}: ", path.display())) && !message.contains('\n'),
        "{message:?}"
    );
    error
}

#[test]
fn files_that_are_no_programs() {
    let _alone = alone();
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    let missing = refusal(&at("missing"));
    assert_eq!((missing.reason.clone(), missing.exit_status()), (Reason::NotFound, 127));

    let expect = |name: &str, reason: Reason| {
        let error = refusal(&at(name));
        assert_eq!((error.reason.clone(), error.exit_status()), (reason, 126));
    };
    fs::create_dir(at("directory")).expect("directory");
    expect("directory", Reason::Directory);
    file(&at("plain"), exit_42("static"), 0o644);
    expect("plain", Reason::PermissionDenied);
    nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("fifo");
    expect("fifo", Reason::NotRegular);
    file(&at("empty"), "", 0o755);
    expect("empty", Reason::UnknownFormat);
    file(&at("text"), "echo hello\n", 0o755);
    expect("text", Reason::UnknownFormat);
    symlink("circle", at("circle")).expect("link");
    assert_eq!(refusal(&at("circle")).errno(), libc::ELOOP);
    assert_eq!(refusal(&at("text/below")).errno(), libc::ENOTDIR);
    symlink("missing", at("dangling")).expect("link");
    assert_eq!(refusal(&at("dangling")).exit_status(), 127);

    file(&at("good"), exit_42("static"), 0o755);
    symlink("good", at("link")).expect("link");
    assert_eq!(
        check(&at("link")).expect("accepted").file_name().to_bytes(),
        at("link").as_os_str().as_encoded_bytes()
    );
    let writer = fs::OpenOptions::new().append(true).open(at("good")).expect("writer");
    // A kernel before 6.14 cannot be asked; there the file counts as runnable.
    if check(&at("good")).is_err() {
        expect("good", Reason::Busy);
    }
    drop(writer);
    assert!(check(&at("good")).is_ok());
}

/// An ELF file with some bytes changed.
fn changed(kind: &str, changes: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = exit_42(kind);
    for (at, new) in changes {
        bytes[*at..at + new.len()].copy_from_slice(new);
    }
    bytes
}

#[test]
fn elf_files_that_do_not_fit() {
    let _alone = alone();
    let directory = scratch();
    let path = directory.path().join("program");
    let expect = |bytes: &[u8], part: &str| {
        file(&path, bytes, 0o755);
        let error = refusal(&path);
        assert!(error.to_string().contains(part), "{error} does not say {part:?}");
        assert_eq!((error.errno(), error.exit_status()), (libc::ENOEXEC, 126));
    };
    expect(&changed("static", &[(0x12, &[0xb7])]), "another machine (AARCH64)");
    expect(&changed("static", &[(0x12, &[0xb7]), (5, &[2])]), "big-endian");
    expect(&changed("static", &[(0x10, &[1])]), "not an executable ELF file (REL)");
    expect(&changed("static", &[(0x36, &[32])]), "program headers of 32 bytes");
    expect(&changed("static", &[(0x38, &[0, 0])]), "no program headers");
    expect(&changed("static", &[(0x38, &[0xff, 0xff])]), "too many program headers");
    expect(&changed("static", &[(0x20, &[0xff; 7])]), "program headers beyond the end of the file");
    expect(b"\x7fELF", "truncated header");
    expect(&exit_42("static")[..63], "truncated header");
    expect(&exit_42("static")[..100], "program headers beyond the end of the file");

    // Files that the kernel might run, or whose fault it finds too late, are refused as well.
    let expect_ours = |bytes: &[u8], part: &str| {
        file(&path, bytes, 0o755);
        let error = check(&path).expect_err("refused");
        assert!(error.to_string().contains(part), "{error} does not say {part:?}");
        assert_eq!((error.errno(), error.exit_status()), (libc::ENOEXEC, 126));
    };
    expect_ours(&changed("static", &[(4, &[1])]), "a 32-bit ELF file");
    expect_ours(&exit_42("static")[..0x2000], "extends beyond the end of the file");
    expect_ours(
        &changed("static", &[(0x18, &[0; 8])]),
        "entry point 0x0 is not in an executable segment",
    );
}

/// Position of PT_INTERP's name in a dynamically linked file.
fn linker_name(bytes: &[u8]) -> std::ops::Range<usize> {
    let name = b"/lib64/ld-linux-x86-64.so.2\0";
    let at = bytes.windows(name.len()).position(|window| window == name).expect("a dynamic linker");
    at..at + name.len()
}

#[test]
fn dynamic_linkers_that_cannot_be_used() {
    let _alone = alone();
    let directory = scratch();
    let path = directory.path().join("program");
    let good = exit_42("pie");
    // The new name must not be longer than the old one.
    let place =
        tempfile::Builder::new().prefix("d").rand_bytes(6).tempdir_in("/tmp").expect("directory");
    let linker = place.path().join("ld");
    let with_name = |name: &[u8]| {
        let mut bytes = good.clone();
        let at = linker_name(&bytes);
        assert!(name.len() < at.len(), "name too long");
        bytes[at.clone()].fill(0);
        bytes[at.start..at.start + name.len()].copy_from_slice(name);
        file(&path, bytes, 0o755);
    };
    let expect = |errno: i32, part: &str| {
        with_name(linker.as_os_str().as_encoded_bytes());
        let error = refusal(&path);
        let message = format!("ELF interpreter {}: {part}", linker.display());
        assert!(error.to_string().contains(&message), "{error} does not say {message:?}");
        assert_eq!((error.errno(), error.exit_status()), (errno, 126));
    };
    expect(libc::ENOENT, "no such file");
    fs::create_dir(&linker).expect("directory");
    expect(libc::EACCES, "is a directory");
    fs::remove_dir(&linker).expect("removed");
    file(&linker, "x".repeat(100), 0o755);
    expect(libc::ELIBBAD, "neither an ELF file nor a script");
    file(&linker, changed("static", &[(0x12, &[0xb7])]), 0o755);
    expect(libc::ELIBBAD, "an ELF file for another machine");
    fs::remove_file(&linker).expect("removed");
    file(&linker, exit_42("static"), 0o644);
    expect(libc::EACCES, "permission denied");
    // For loading, any executable works as a dynamic linker.
    fs::remove_file(&linker).expect("removed");
    file(&linker, exit_42("static-pie"), 0o755);
    assert_eq!(check(&path).expect("accepted").linker_path(), Some(linker.as_path()));
    assert_eq!(run_loaded(&path, &["x"], &[], &Default::default()), run_native(&path, &["x"], &[]));

    // The kernel takes an empty name for the current directory.
    with_name(b"");
    assert_eq!(refusal(&path).errno(), libc::EACCES);
    let mut unended = good.clone();
    let at = linker_name(&unended);
    unended[at.end - 1] = b'x';
    file(&path, unended, 0o755);
    assert!(refusal(&path).to_string().contains("interpreter name without end"));
}

/// A user other than root is subject to file permissions.
#[test]
fn permissions_of_an_ordinary_user() {
    let _alone = alone();
    // SAFETY: always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let directory = scratch();
    fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("mode");
    let at = |name: &str| directory.path().join(name);
    file(&at("unreadable"), exit_42("static"), 0o711);
    file(&at("others"), exit_42("static"), 0o744);
    fs::create_dir(at("closed")).expect("directory");
    file(&at("closed/good"), exit_42("static"), 0o755);
    fs::set_permissions(at("closed"), std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .expect("mode");
    let outcome = in_child(|| {
        // SAFETY: a plain system call; it concerns this child only.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setuid, 65534) }, 0);
        let reason = |name: &str| check(&at(name)).expect_err("refused").reason;
        assert_eq!(reason("unreadable"), Reason::Unreadable);
        assert_eq!(reason("others"), Reason::PermissionDenied);
        assert_eq!(reason("closed/good"), Reason::PermissionDenied);
        0
    });
    assert_eq!(outcome.status, Ok(0));
}
