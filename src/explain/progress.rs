//! A line on a terminal that says what takes long. It appears after [`PATIENCE`], on standard error, and
//! is gone when the work is done.
//!
//! Data: [`Progress`], which owns the thread that draws. No lock; messages go through a channel.
//!
//! Example: `Progress::new("explaining")` lives while versions are explained.

use indicatif::ProgressBar;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// What is done sooner shows no line.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two pictures of the line.
const TICK: Duration = Duration::from_millis(200);

/// A line that is shown as long as this value lives.
pub struct Progress(Option<(Sender<()>, JoinHandle<()>)>);

impl Progress {
    /// Says what is done. Nothing is drawn if standard error is no terminal.
    pub fn new(message: String) -> Progress {
        let (end, ended) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            if ended.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let line = ProgressBar::new_spinner().with_message(message);
            line.enable_steady_tick(TICK);
            let _ = ended.recv();
            line.finish_and_clear();
        });
        Progress(Some((end, thread)))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.0.take() {
            drop(end);
            let _ = thread.join();
        }
    }
}
