//! `execve` and `execveat`: the new program is translated too, by a new dynasour in this process.
//!
//! ```text
//! guest:   execve(PATH, [A0, A1, …], ENV)
//! kernel:  execve(TRANSLATOR, [PREFIX…, "--argv0=A0", "--", PATH, A1, …], ENV)
//! ```
//!
//! TRANSLATOR is the program of this process ([`super::translator`]), unless that has started the guest by the library.
//! PATH is passed as the guest wrote it; with `--argv0` it is not searched for in `$PATH`. The
//! kernel reads A1… and ENV from the guest's own memory. The target is checked before the call,
//! because after a successful call no guest is left to which an error could be returned.
//!
//! Some calls are left to the kernel, which refuses them or runs the program natively:
//! * files that may be executed but not read;
//! * programs for other machines;
//! * files whose execution changes privileges (set-user-id and the like): executing the translator
//!   instead of the file would not change them;
//! * all programs where there is no `/proc`, without which the translator does not start.
//!
//! Data: the arguments of a call under way ([`System::exec_arguments`]). The kernel must be able to
//! read them until the call is over.
//!
//! Invariant: the new program inherits the mask and the ignored signals that the kernel has. So for
//! the duration of the call the kernel has the guest's mask, and ignores those of the six signals
//! ([`SYNCHRONOUS_SIGNALS`]) that the guest ignores. After a call that fails, mask and dispositions are as
//! before.
//!
//! Called on the guest's own thread, outside native code, with no lock held. In a process with
//! several threads or companions the other threads stand still during the call (`Threads`), so
//! that none of them is ended while it holds a lock of memory that outlives it.
//!
//! Example: `execve("./prog", ["-login", "x"], env)` becomes `execve("/usr/bin/dynasour", ["dynasour",
//! "run", "--argv0=-login", "--", "./prog", "x"], env)`.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use dynasour_guest::image;

use crate::kernel::entry::Call;
use crate::kernel::process::guest_access::{guest_read, guest_string};
use crate::kernel::process::limits::Limit;
use crate::kernel::process::own_files::executable_named;
use crate::kernel::process::translator::Translator;
use crate::kernel::process::{Done, Engine, System};
use crate::kernel::signal::{self, SIG_IGN, SYNCHRONOUS_SIGNALS, gate};

/// Bytes of one string, with its terminator (execve(2): `MAX_ARG_STRLEN`, 32 pages).
const LONGEST_STRING: usize = 32 * 4096;
/// Bytes of a path, with its terminator (execve(2)).
const LONGEST_PATH: usize = libc::PATH_MAX as usize;
/// Pointers that fit into 6 MiB, the kernel's limit on all strings and pointers together
/// (execve(2)). More are refused before memory is allocated for them.
const MOST_ARGUMENTS: usize = (6 << 20) / 8;

/// How new programs are translated.
pub struct Follow {
    /// The file of the translator.
    pub translator: Translator,
    /// The first strings of the new argv: the translator's `argv[0]`, `run`, options.
    pub prefix: Vec<CString>,
    /// Options that follow `prefix` only in the process that the user started.
    pub own_options: Vec<CString>,
}

/// Whether the translator can run the program with the same privileges as the kernel would.
fn is_translatable(path: &CStr) -> bool {
    let plan = image::check(Path::new(OsStr::from_bytes(path.to_bytes())));
    plan.is_ok_and(|plan| !gains_privileges(plan.program_path()))
}

/// Whether executing the file changes what the process may do: by its owner or group, or by
/// capabilities that it has (`execve(2)`, `capabilities(7)`).
fn gains_privileges(path: &Path) -> bool {
    const OTHER_GROUP: u32 = libc::S_ISGID | libc::S_IXGRP;
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: asks about a file and this process; the structures are plain data.
    unsafe {
        let (mut file, mut mount): (libc::stat, libc::statvfs) =
            (std::mem::zeroed(), std::mem::zeroed());
        if libc::stat(path.as_ptr(), &mut file) != 0 {
            return false;
        }
        let is_other_user = file.st_mode & libc::S_ISUID != 0 && file.st_uid != libc::geteuid();
        let is_other_group =
            file.st_mode & OTHER_GROUP == OTHER_GROUP && file.st_gid != libc::getegid();
        let is_capable = || {
            let attribute = c"security.capability".as_ptr();
            libc::geteuid() != 0
                && libc::getxattr(path.as_ptr(), attribute, std::ptr::null_mut(), 0) > 0
        };
        (is_other_user || is_other_group || is_capable())
            && libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 0
            && libc::statvfs(path.as_ptr(), &mut mount) == 0
            && mount.f_flag & libc::ST_NOSUID == 0
    }
}

/// The argv of the new program's translator.
pub(crate) struct Arguments {
    /// Addresses of strings, with the final null.
    pointers: Vec<u64>,
    /// The strings that were made here; the others lie in guest memory and in [`Follow`].
    _strings: Vec<CString>,
}

impl Arguments {
    /// `guest_arguments` are the addresses of the guest's strings from `argv[1]` on. `inherited`
    /// are options that say what the new program inherits.
    fn new<'a>(
        prefix: impl IntoIterator<Item = &'a CString>,
        inherited: Vec<CString>,
        path: CString,
        argv0: &CStr,
        guest_arguments: &[u64],
    ) -> Arguments {
        let mut option = b"--argv0=".to_vec();
        option.extend_from_slice(argv0.to_bytes());
        let argv0 = CString::new(option).unwrap_or_default();
        let mut pointers: Vec<u64> = prefix.into_iter().map(|s| s.as_ptr() as u64).collect();
        pointers.extend(inherited.iter().map(|option| option.as_ptr() as u64));
        pointers.extend([argv0.as_ptr() as u64, c"--".as_ptr() as u64, path.as_ptr() as u64]);
        pointers.extend_from_slice(guest_arguments);
        pointers.push(0);
        Arguments { pointers, _strings: [path, argv0].into_iter().chain(inherited).collect() }
    }
}

/// Reads the guest's argument pointers, without the final null. The error is an errno.
fn read_pointers(address: u64) -> Result<Vec<u64>, i32> {
    let mut pointers = Vec::new();
    if address == 0 {
        return Ok(pointers);
    }
    loop {
        let word = u64::from_le_bytes(guest_read(address.wrapping_add(8 * pointers.len() as u64))?);
        if word == 0 {
            return Ok(pointers);
        }
        if pointers.len() == MOST_ARGUMENTS {
            return Err(libc::E2BIG);
        }
        pointers.push(word);
    }
}

/// The path of an open file, if that path still names this file.
fn path_of_descriptor(fd: i32) -> Option<CString> {
    let link = CString::new(format!("/proc/self/fd/{fd}")).ok()?;
    let mut target = vec![0u8; LONGEST_PATH];
    // SAFETY: the buffers are as long as said; stat structures are plain data.
    unsafe {
        let len = libc::readlink(link.as_ptr(), target.as_mut_ptr().cast(), target.len());
        target.truncate(usize::try_from(len).ok()?);
        let target = CString::new(target).ok()?;
        let (mut there, mut here): (libc::stat, libc::stat) =
            (std::mem::zeroed(), std::mem::zeroed());
        let same = libc::stat(target.as_ptr(), &mut there) == 0
            && libc::fstat(fd, &mut here) == 0
            && (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino);
        same.then_some(target)
    }
}

/// A name for an open file that has no path (a memfd, a deleted file): the link in `/proc` of a
/// descriptor that stays open across execve. Duplicates `fd` if execve closes it. The error is an
/// errno.
fn path_through_descriptor(fd: i32) -> Result<CString, i32> {
    // SAFETY: both calls only concern descriptors.
    let lasting = unsafe {
        match libc::fcntl(fd, libc::F_GETFD) {
            -1 => return Err(libc::EBADF),
            flags if flags & libc::FD_CLOEXEC == 0 => fd,
            // Numbers from 64 on (guess): programs expect their low numbers to be free.
            _ => libc::fcntl(fd, libc::F_DUPFD, 64),
        }
    };
    match lasting {
        -1 => Err(libc::EMFILE),
        lasting => CString::new(format!("/proc/self/fd/{lasting}")).map_err(|_| libc::EINVAL),
    }
}

/// The arguments of `execve` or `execveat`.
struct Request {
    dirfd: i32,
    path: u64,
    argv: u64,
    envp: u64,
    flags: i32,
}

impl Request {
    fn parse(call: &Call) -> Request {
        let a = call.args;
        match i64::from(call.nr as u32) {
            libc::SYS_execve => {
                Request { dirfd: libc::AT_FDCWD, path: a[0], argv: a[1], envp: a[2], flags: 0 }
            }
            _ => Request {
                dirfd: a[0] as i32,
                path: a[1],
                argv: a[2],
                envp: a[3],
                flags: a[4] as i32,
            },
        }
    }

    /// The name that the kernel itself gives a file found through a descriptor: scripts and
    /// AT_EXECFN show it. `None` if the descriptor is closed by execve, so that the name would not
    /// lead to the file any more.
    fn kernels_name(&self, path: &[u8]) -> Option<CString> {
        let relative =
            !path.starts_with(b"/") && (!path.is_empty() || self.flags & libc::AT_EMPTY_PATH != 0);
        if self.dirfd < 0 || !relative {
            return None;
        }
        let mut name = format!("/dev/fd/{}", self.dirfd).into_bytes();
        if !path.is_empty() {
            name.push(b'/');
            name.extend_from_slice(path);
        }
        let name = CString::new(name).ok()?;
        // SAFETY: asks about a descriptor and a file.
        let lasts = unsafe {
            libc::fcntl(self.dirfd, libc::F_GETFD) == 0
                && libc::access(name.as_ptr(), libc::F_OK) == 0
        };
        lasts.then_some(name)
    }

    /// A name of the file to run that is valid for the new program, too. The error is an errno.
    fn target(&self, own: &Arc<CStr>) -> Result<CString, i32> {
        let name = self.name(own)?;
        let meant =
            self.flags & libc::AT_SYMLINK_NOFOLLOW != 0 && self.flags & libc::AT_EMPTY_PATH == 0;
        if meant && is_symlink(&name) { Err(libc::ELOOP) } else { Ok(name) }
    }

    /// As [`Request::target`], but also if the file is a symbolic link that must not be followed.
    fn name(&self, own: &Arc<CStr>) -> Result<CString, i32> {
        let path = guest_string(self.path, LONGEST_PATH, libc::ENAMETOOLONG)?;
        let bytes = path.to_bytes();
        if bytes.is_empty() && self.flags & libc::AT_EMPTY_PATH == 0 {
            return Err(libc::ENOENT);
        }
        if self.flags & !(libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW) != 0 {
            return Err(libc::EINVAL);
        }
        if let Some(executable) = executable_named(self.path, own) {
            return Ok(executable.as_ref().to_owned());
        }
        if let Some(name) = self.kernels_name(bytes) {
            return Ok(name);
        }
        if bytes.is_empty() {
            return match self.dirfd {
                libc::AT_FDCWD => Err(libc::EACCES),
                _ => path_of_descriptor(self.dirfd)
                    .map_or_else(|| path_through_descriptor(self.dirfd), Ok),
            };
        }
        let mut name = Vec::new();
        if bytes[0] != b'/' && self.dirfd != libc::AT_FDCWD {
            // SAFETY: asks about a descriptor.
            if unsafe { libc::fcntl(self.dirfd, libc::F_GETFD) } == -1 {
                return Err(libc::EBADF);
            }
            name.extend_from_slice(path_of_descriptor(self.dirfd).ok_or(libc::ENOENT)?.to_bytes());
            name.push(b'/');
        }
        name.extend_from_slice(bytes);
        CString::new(name).map_err(|_| libc::EINVAL)
    }
}

fn is_symlink(path: &CStr) -> bool {
    // SAFETY: a stat structure is plain data.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        libc::lstat(path.as_ptr(), &mut stat) == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFLNK
    }
}

impl System {
    pub(crate) fn exec_call(&mut self, engine: &mut dyn Engine, call: &Call) -> Done {
        let Some(follow) = self.process.follow().cloned() else {
            return self.exec_natively(engine, call);
        };
        let request = Request::parse(call);
        let path = match request.target(self.process.executable()) {
            Ok(path) if is_translatable(&path) => path,
            Ok(_) => return self.exec_natively(engine, call),
            Err(errno) => return Done::error(errno),
        };
        let filters = match self.seccomp.to_file() {
            Ok(filters) => filters,
            Err(errno) => return Done::error(errno),
        };
        let done = self.exec_translated(engine, &request, &follow, path, filters);
        if let Some(fd) = filters {
            // SAFETY: opened above; the program is still this one.
            unsafe { libc::close(fd) };
        }
        match done {
            // The path was found, so the translator was not.
            done if done == Done::error(libc::ENOENT) => self.exec_natively(engine, call),
            done => done,
        }
    }

    /// Executes the translator in order to run `path`. It inherits `filters`, a descriptor.
    fn exec_translated(
        &mut self,
        engine: &mut dyn Engine,
        request: &Request,
        follow: &Follow,
        path: CString,
        filters: Option<i32>,
    ) -> Done {
        let prepared = read_pointers(request.argv).and_then(|pointers| {
            let argv0 = match pointers.first() {
                Some(&address) => guest_string(address, LONGEST_STRING, libc::E2BIG)?,
                // A program without arguments gets an empty name.
                None => CString::default(),
            };
            // Report and logs are about the process, so the last program that it executes makes the
            // report.
            let own_options = if self.process.is_first() { &follow.own_options[..] } else { &[] };
            let guest_arguments = pointers.get(1..).unwrap_or(&[]);
            let filters = filters.and_then(|fd| CString::new(format!("--seccomp={fd}")).ok());
            let limit = self.process.address_space().and_then(Limit::option);
            let inherited = filters.into_iter().chain(limit).collect();
            Ok(Arguments::new(
                follow.prefix.iter().chain(own_options),
                inherited,
                path,
                &argv0,
                guest_arguments,
            ))
        });
        let arguments = match prepared {
            Ok(arguments) => self.exec_arguments.insert(arguments),
            Err(errno) => return Done::error(errno),
        };
        let argv = arguments.pointers.as_ptr() as u64;
        let file = follow.translator.path().as_ptr() as u64;
        self.switch_program(engine, &Call::new(libc::SYS_execve, &[file, argv, request.envp]))
    }

    /// Leaves the call to the kernel. The link to a guest's executable in `/proc` is replaced by that file.
    fn exec_natively(&mut self, engine: &mut dyn Engine, call: &Call) -> Done {
        let request = Request::parse(call);
        let is_possible =
            |path: CString| image::check(Path::new(OsStr::from_bytes(path.to_bytes()))).is_ok();
        if self.process.reports()
            && request.target(self.process.executable()).is_ok_and(is_possible)
        {
            engine.report(self);
        }
        let mut call = *call;
        let executable = executable_named(request.path, self.process.executable());
        if let Some(executable) = &executable {
            let path = if i64::from(call.nr as u32) == libc::SYS_execve { 0 } else { 1 };
            call.args[path] = executable.as_ptr() as u64;
        }
        self.switch_program(engine, &call)
    }

    /// Performs an execve. If the process shares memory, its other threads stand still meanwhile.
    fn switch_program(&mut self, engine: &mut dyn Engine, call: &Call) -> Done {
        if !self.process.shares_memory() {
            return self.switch_alone(call);
        }
        // A successful call ends the other threads. Those that stand still hold no lock.
        self.process.threads().stop_others(|| engine.call_threads());
        let done = self.switch_alone(call);
        self.process.threads().release_others();
        done
    }

    /// Performs an execve. For its duration the kernel has the guest's mask and the guest's ignored
    /// signals.
    fn switch_alone(&mut self, call: &Call) -> Done {
        let synchronous_blocked = self.mask & signal::SYNCHRONOUS;
        // A sample that is pending would reach the new program.
        let _no_samples = self.samples.pause(synchronous_blocked);
        if synchronous_blocked != 0 && !gate::open(self.mask) {
            return Done::Restart;
        }
        for signo in SYNCHRONOUS_SIGNALS {
            // Execve itself resets handlers to the default. Until then the host needs its own.
            let action = self.process.action(signo);
            if action.handler == SIG_IGN {
                signal::set_kernel_action(signo, &action);
            }
        }
        // Held signals must be pending in the new program, too.
        self.send_held_again(synchronous_blocked);
        let done = self.pass_exec(call);
        // The call has failed: restores what the host needs.
        if synchronous_blocked != 0 {
            // If the gate does not open, the handler has accepted a signal and unblocked the six.
            let _ = gate::open(signal::host_mask(self.mask));
        }
        for signo in
            SYNCHRONOUS_SIGNALS.into_iter().filter(|&s| self.process.action(s).handler == SIG_IGN)
        {
            signal::set_kernel_action(signo, &signal::mirror(signo, &self.process.action(signo)));
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(address: u64) -> String {
        // SAFETY: the pointers are to strings that the test keeps.
        unsafe { CStr::from_ptr(address as *const libc::c_char) }.to_string_lossy().into_owned()
    }

    #[test]
    fn the_translators_arguments() {
        let prefix = [c"dynasour".to_owned(), c"run".to_owned()];
        let rest = [c"x".as_ptr() as u64, c"--".as_ptr() as u64];
        let arguments = Arguments::new(
            &prefix,
            vec![c"--seccomp=5".to_owned()],
            c"./prog".to_owned(),
            c"-login",
            &rest,
        );
        let (last, pointers) = arguments.pointers.split_last().expect("never empty");
        assert_eq!(*last, 0);
        let texts: Vec<_> = pointers.iter().map(|&p| text(p)).collect();
        assert_eq!(
            texts,
            ["dynasour", "run", "--seccomp=5", "--argv0=-login", "--", "./prog", "x", "--"]
        );
    }

    #[test]
    fn pointers_are_read_up_to_the_null() {
        assert_eq!(read_pointers(0), Ok(vec![]));
        assert_eq!(read_pointers([0u64].as_ptr() as u64), Ok(vec![]));
        assert_eq!(read_pointers([5u64, 6, 0, 7].as_ptr() as u64), Ok(vec![5, 6]));
    }

    #[test]
    fn targets() {
        let target = |dirfd: i32, path: &CStr, flags: i32| {
            Request { dirfd, path: path.as_ptr() as u64, argv: 0, envp: 0, flags }
                .target(&c"/bin/guest".into())
        };
        assert_eq!(target(libc::AT_FDCWD, c"./x", 0), Ok(c"./x".to_owned()));
        assert_eq!(target(libc::AT_FDCWD, c"/proc/self/exe", 0), Ok(c"/bin/guest".to_owned()));
        assert_eq!(target(libc::AT_FDCWD, c"", 0), Err(libc::ENOENT));
        assert_eq!(target(libc::AT_FDCWD, c"x", 1), Err(libc::EINVAL));
        assert_eq!(target(9999, c"x", 0), Err(libc::EBADF));
        let file = std::fs::File::open("/usr").expect("a directory");
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        assert_eq!(target(fd, c"bin/true", 0), Ok(c"/usr/bin/true".to_owned()));
        assert_eq!(target(fd, c"", libc::AT_EMPTY_PATH), Ok(c"/usr".to_owned()));
        // SAFETY: the descriptor is the test's.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }, 0);
        let numbered = |rest: &str| CString::new(format!("/dev/fd/{fd}{rest}")).expect("no NUL");
        assert_eq!(target(fd, c"bin/true", 0), Ok(numbered("/bin/true")));
        assert_eq!(target(fd, c"", libc::AT_EMPTY_PATH), Ok(numbered("")));
        assert_eq!(target(fd, c"/bin/true", 0), Ok(c"/bin/true".to_owned()));
        let link = target(libc::AT_FDCWD, c"/proc/self/cwd", libc::AT_SYMLINK_NOFOLLOW);
        assert_eq!(link, Err(libc::ELOOP));
    }
}
