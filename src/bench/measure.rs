//! Runs one command, and measures its time and memory.
//!
//! A run is a process group of its own, in a given directory, with a time limit. A watchdog thread
//! kills the group when the limit expires. Times and memory come from `wait4`, so they include the
//! children that the process waited for.
//!
//! *Invariant.* The process is reaped only after the watchdog has stopped using its id. Otherwise
//! the watchdog might kill another group that got the same number.
//!
//! Example: `Invocation { argv: ["sleep", "9"], stdin: None }` with a limit of 1 s gives a
//! [`Sample`] with `timed_out`, a wall time of one second and the status of SIGKILL. Any thread may
//! run invocations; there is no lock.

use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// A command with everything that determines its behaviour.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// The program and its arguments.
    pub argv: Vec<OsString>,
    /// Standard input; `/dev/null` if none.
    pub stdin: Option<PathBuf>,
}

/// The results of one run.
#[derive(Debug)]
pub struct Sample {
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Seconds from start to end.
    pub wall: f64,
    /// Processor seconds, user and system, of the process and the children it waited for.
    pub cpu: f64,
    /// Peak resident memory of the largest process, in bytes.
    pub memory: u64,
    /// Whether it was killed because it exceeded the time limit.
    pub timed_out: bool,
}

impl Invocation {
    /// A shell command line that runs the command.
    pub fn line(&self) -> String {
        let quoted: Vec<String> =
            self.argv.iter().map(|word| quote(&word.to_string_lossy())).collect();
        let stdin =
            self.stdin.as_ref().map(|path| format!(" < {}", quote(&path.to_string_lossy())));
        quoted.join(" ") + &stdin.unwrap_or_default()
    }

    /// Runs the command in `directory` for at most `limit`.
    ///
    /// # Errors
    /// The command could not be started, or its output could not be read.
    pub fn run(&self, directory: &Path, limit: Duration) -> Result<Sample> {
        let mut stdout = tempfile::tempfile().context("cannot make a temporary file")?;
        let stdin = match &self.stdin {
            None => Stdio::null(),
            Some(path) => {
                File::open(path).with_context(|| format!("cannot read {}", path.display()))?.into()
            }
        };
        let start = Instant::now();
        let child = Command::new(&self.argv[0])
            .args(&self.argv[1..])
            .current_dir(directory)
            .env("LC_ALL", "C")
            .stdin(stdin)
            .stdout(stdout.try_clone().context("cannot duplicate a descriptor")?)
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", self.argv[0].to_string_lossy()))?;
        let ended = wait(child.id() as i32, limit)?;
        let wall = start.elapsed().as_secs_f64();
        let mut bytes = Vec::new();
        stdout
            .rewind()
            .and_then(|()| stdout.read_to_end(&mut bytes))
            .context("cannot read the output")?;
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        Ok(Sample {
            status: ended.status,
            stdout: bytes,
            wall,
            cpu: seconds(ended.usage.ru_utime) + seconds(ended.usage.ru_stime),
            memory: ended.usage.ru_maxrss as u64 * 1024,
            timed_out: ended.timed_out,
        })
    }
}

/// How a process ended, and what it used.
struct Ended {
    status: ExitStatus,
    usage: libc::rusage,
    timed_out: bool,
}

/// Waits for the leader of a process group and kills the group after `limit`.
fn wait(pid: i32, limit: Duration) -> Result<Ended> {
    let (done, over) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let watchdog = scope.spawn(move || {
            let late = over.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if late {
                // SAFETY: a system call; the leader has not been waited for, so the number is still
                // its group's.
                unsafe { libc::kill(-pid, libc::SIGKILL) };
            }
            late
        });
        let mut status = 0;
        // SAFETY: all-zero bytes are a valid rusage.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // The watchdog must have stopped using the process id before the process is reaped.
        let exited = wait_without_reaping(pid);
        drop(done);
        let timed_out = watchdog.join().expect("the watchdog does not panic");
        exited?;
        // SAFETY: waits for our own child; both results are ours.
        if unsafe { libc::wait4(pid, &mut status, 0, &mut usage) } != pid {
            return Err(std::io::Error::last_os_error())
                .context("cannot wait for the process (wait4)");
        }
        // Descendants that are still running would disturb the next run.
        // SAFETY: a system call; a group that is empty answers ESRCH.
        unsafe { libc::kill(-pid, libc::SIGKILL) };
        Ok(Ended { status: ExitStatus::from_raw(status), usage, timed_out })
    })
}

/// Waits until the process has ended, and leaves it a zombie.
fn wait_without_reaping(pid: i32) -> Result<()> {
    loop {
        // SAFETY: all-zero bytes are a valid siginfo.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: waits for our own child and leaves it a zombie.
        let done = unsafe {
            libc::waitid(libc::P_PID, pid as u32, &mut info, libc::WEXITED | libc::WNOWAIT)
        } == 0;
        let error = std::io::Error::last_os_error();
        if done {
            return Ok(());
        }
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error).context("cannot wait for the process (waitid)");
        }
    }
}

/// The first byte at which two outputs differ.
pub fn difference(a: &[u8], b: &[u8]) -> Option<usize> {
    let common = a.iter().zip(b).position(|(a, b)| a != b);
    common.or_else(|| (a.len() != b.len()).then_some(a.len().min(b.len())))
}

/// The argument as a shell needs it.
fn quote(argument: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !argument.is_empty() && argument.chars().all(plain) {
        argument.to_string()
    } else {
        format!("'{}'", argument.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: u64) -> Sample {
        let argv = ["/bin/sh", "-c", script].map(OsString::from).to_vec();
        let run = Invocation { argv, stdin: None };
        run.run(Path::new("/"), Duration::from_millis(limit)).expect("sh")
    }

    #[test]
    fn a_run_has_output_status_and_cost() {
        let sample =
            shell("echo out; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; exit 3", 60_000);
        assert_eq!((sample.status.code(), &*sample.stdout), (Some(3), &b"out\n"[..]));
        assert!(sample.cpu > 0.0 && sample.wall > 0.0 && sample.memory > 100_000, "{sample:?}");
        assert!(!sample.timed_out);
        assert_eq!(shell("kill -9 $$", 60_000).status.signal(), Some(9));
    }

    #[test]
    fn the_limit_ends_it_with_its_children() {
        let sample = shell("sleep 1000 & sleep 1000", 100);
        assert!(sample.timed_out && sample.wall < 100.0);
    }

    #[test]
    fn differences_are_found() {
        assert_eq!(difference(b"abc", b"abc"), None);
        assert_eq!(difference(b"abc", b"abd"), Some(2));
        assert_eq!(difference(b"abc", b"ab"), Some(2));
        assert_eq!(difference(b"", b"x"), Some(0));
    }

    #[test]
    fn lines_are_for_a_shell() {
        let argv = ["a", "b c", "it's", ""].map(OsString::from).to_vec();
        let run = Invocation { argv, stdin: Some("x".into()) };
        assert_eq!(run.line(), r"a 'b c' 'it'\''s' '' < x");
    }
}
