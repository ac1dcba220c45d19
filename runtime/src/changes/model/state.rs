//! What the threads of the model share, and what each of them knows.

use super::bug::Bug;

pub const PAGES: usize = 2;
pub const THREADS: usize = 3;

/// Rights of a mapping, as bits. Everything can be read.
pub type Rights = u8;
pub const W: Rights = 1;
pub const X: Rights = 2;

/// One operation of a guest thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// Stores to the page.
    Store(usize),
    /// Calls the code of the page, which the interpreter runs.
    Interpret(usize),
    /// Calls the code of the page, which runs as a copied block.
    Run(usize),
    /// Compiles a trace of the block that the interpreter has of the page, if it has one.
    Trace(usize),
    /// `mprotect`.
    Protect(usize, Rights),
    /// An `mprotect` that the kernel refuses.
    Refused(usize),
    /// `munmap`.
    Unmap(usize),
    /// `mmap` with new contents, to where nothing is.
    Map(usize, Rights),
    /// `mremap` to the same place.
    Remap(usize),
    /// A system call that writes to the page.
    Output(usize),
    /// The host stores to the page on behalf of the thread, as it does for a signal's frame.
    HostStore(usize),
    /// A jump is written into the page's code, where it stands.
    Patch(usize),
    /// The next thread begins.
    Spawn,
    /// `fork`: this thread goes on, as the only one, in the child.
    Fork,
}

impl Op {
    /// The page that the operation is about.
    pub fn page(self) -> usize {
        match self {
            Op::Store(p) | Op::Interpret(p) | Op::Run(p) | Op::Trace(p) | Op::Protect(p, _) => p,
            Op::Refused(p)
            | Op::Unmap(p)
            | Op::Map(p, _)
            | Op::Remap(p)
            | Op::Output(p)
            | Op::HostStore(p)
            | Op::Patch(p) => p,
            Op::Spawn | Op::Fork => 0,
        }
    }
}

/// Code that was made from a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Code {
    /// The version of the contents that it was made from.
    pub version: u8,
    /// It compares its bytes when it begins to run.
    pub checks: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Page {
    pub mapped: bool,
    /// The rights that the guest has set.
    pub rights: Rights,
    /// Counts changes of contents.
    pub version: u8,
    /// The newest version that a completed operation has left.
    pub completed: u8,
    /// The last operation that took the right to execute, or the mapping, away has completed.
    pub denied: bool,
    /// What the translator believes: none if it has forgotten.
    pub record: Option<Rights>,
    /// Write-protected behind the guest's back since this moment.
    pub guarded: Option<u8>,
    /// How many changes of mappings, stores and outputs are announced.
    pub announced: [u8; 3],
    /// Some thread has read it.
    pub read: bool,
    /// The copied block or trace.
    pub shared: Option<Code>,
    /// A fragment that was made from the page and rests.
    pub resting: Option<Code>,
    /// The host has written to it, and what was made from it is not dropped yet.
    pub written: bool,
    /// The version of the contents into which a jump is patched.
    pub patched: Option<u8>,
}

/// In [`Page::announced`].
pub const MAPPING: usize = 0;
pub const STORE: usize = 1;
pub const OUTPUT: usize = 2;

impl Page {
    pub fn kernel_writable(&self) -> bool {
        self.mapped && self.rights & W != 0 && self.guarded.is_none()
    }

    pub fn is_announced(&self) -> bool {
        self.announced != [0; 3]
    }

    /// Is a patch in it that the guest's own code may have replaced, or may come to replace?
    pub fn has_stale_patch(&self) -> bool {
        self.patched.is_some_and(|version| version != self.version || !self.mapped || self.may(W))
    }

    pub fn may(&self, right: Rights) -> bool {
        self.mapped && self.rights & right == right
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ThreadState {
    Outside,
    Interpreting,
    Cache,
}

/// A thread that is dropping code of a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Drop {
    pub page: usize,
    pub stage: u8,
    /// Fragments were made from it, so threads in the cache have to come out.
    pub touched: bool,
    /// The threads that it waits for, and how they had moved when it began to wait.
    pub waits: [Option<u8>; THREADS],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Thread {
    /// The next operation; it has ended if there is none.
    pub at: u8,
    /// The stage of that operation.
    pub stage: u8,
    pub begun: bool,
    pub gone: bool,
    pub state: ThreadState,
    pub moves: u8,
    /// The pages whose code it has to forget.
    pub posted: [bool; PAGES],
    /// Blocks of its interpreter.
    pub own: [Option<Code>; PAGES],
    /// The version that it has fetched, and the moment before the fetch.
    pub fetched: u8,
    pub moment: u8,
    /// The code that it is about to run, or to compile a trace of.
    pub running: Option<Code>,
    /// The contents that its operation has left.
    pub effect: Option<u8>,
    /// Its operation has taken the right to execute, or the mapping, away.
    pub denies: bool,
    /// The generation of its plan.
    pub plan: u8,
    /// Code that it has to drop.
    pub dropping: Option<Drop>,
    /// At some time during the operation the guest's rights forbade it.
    pub forbidden: bool,
}

/// The whole state.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    pub pages: [Page; PAGES],
    pub threads: [Thread; THREADS],
    /// The thread that has the exclusive right.
    pub exclusive: Option<u8>,
    /// The thread that holds the fragments' lock.
    pub fragments: Option<u8>,
    /// See `Guards::now`.
    pub moment: u8,
    /// When a change of mappings was published last.
    pub published: u8,
    /// Counts what spoils plans.
    pub generation: u8,
    pub threaded: bool,
    /// Is there something written? As the real flag, it is cleared after dropping.
    pub written: bool,
}

/// A program: what each thread does, and which begin by themselves.
#[derive(Clone, Debug)]
pub struct Program {
    pub threads: Vec<Vec<Op>>,
    /// The first thread begins alone, and the others by [`Op::Spawn`].
    pub spawns: bool,
    /// The rights of the pages at first; not mapped if none.
    pub rights: [Option<Rights>; PAGES],
    pub bug: Option<Bug>,
}

impl Program {
    pub fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    pub fn op(&self, thread: usize, at: u8) -> Option<Op> {
        self.threads.get(thread)?.get(at as usize).copied()
    }
}

impl State {
    pub fn new(program: &Program) -> State {
        let page = |rights: Option<Rights>| Page {
            mapped: rights.is_some(),
            rights: rights.unwrap_or(0),
            version: 0,
            completed: 0,
            denied: rights.is_none_or(|rights| rights & X == 0),
            record: rights,
            guarded: None,
            announced: [0; 3],
            read: false,
            shared: None,
            resting: None,
            written: false,
            patched: None,
        };
        let thread = |n: usize| Thread {
            at: 0,
            stage: 0,
            begun: n == 0 || !program.spawns,
            gone: false,
            state: ThreadState::Outside,
            moves: 0,
            posted: [false; PAGES],
            own: [None; PAGES],
            fetched: 0,
            moment: 0,
            running: None,
            effect: None,
            denies: false,
            plan: 0,
            dropping: None,
            forbidden: false,
        };
        let mut state = State {
            pages: program.rights.map(page),
            threads: [0, 1, 2].map(thread),
            exclusive: None,
            fragments: None,
            moment: 0,
            published: 0,
            generation: 0,
            threaded: !program.spawns,
            written: false,
        };
        for thread in 0..THREADS {
            state.begin_operation(program, thread);
        }
        state
    }

    /// The thread comes to its operation.
    pub fn begin_operation(&mut self, program: &Program, thread: usize) {
        self.threads[thread].stage = 0;
        self.threads[thread].forbidden = false;
        self.note_forbidden(program);
    }

    /// Notes for each operation under way whether it is forbidden now.
    pub fn note_forbidden(&mut self, program: &Program) {
        for n in 0..THREADS {
            let Some(op) = program.op(n, self.threads[n].at) else { continue };
            let page = &self.pages[op.page()];
            self.threads[n].forbidden |= match op {
                Op::Store(_) | Op::Output(_) | Op::HostStore(_) => !page.may(W),
                Op::Interpret(_) | Op::Run(_) => !page.may(X),
                _ => false,
            };
        }
    }

    pub fn has_ended(&self, program: &Program, thread: usize) -> bool {
        let t = &self.threads[thread];
        t.gone || program.op(thread, t.at).is_none()
    }
}
