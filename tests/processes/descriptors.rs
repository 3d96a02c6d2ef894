//! Memory of `cuMemCreate` that a process exports as a descriptor and another one imports: random sequences of calls and pauses of two
//! real programs, checked against a model.

use crate::common;
use crate::common::machine::{Machine, Program};
use crate::common::sharing::MIB;
use proptest::prelude::*;
use serde_json::json;

/// What the programs need in addition.
const CALLS: &str = r#"
import socket
SIZE, NONE = ctypes.c_size_t(2 << 20), ctypes.c_uint64(0)
cuda.cudaFree(None)

def create():
    handle, wanted = ctypes.c_uint64(), (ctypes.c_uint32 * 8)(1, 1, 1)
    return cuda.cuMemCreate(ctypes.byref(handle), SIZE, wanted, NONE) or handle.value

def release(handle):
    return cuda.cuMemRelease(ctypes.c_uint64(handle))

def retain(at):
    handle = ctypes.c_uint64()
    return cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(at)) or handle.value

def map_(handle):
    at, access = ctypes.c_uint64(), (ctypes.c_uint32 * 3)(1, 0, 3)
    return (
        cuda.cuMemAddressReserve(ctypes.byref(at), SIZE, SIZE, NONE, NONE)
        or cuda.cuMemMap(at, SIZE, NONE, ctypes.c_uint64(handle), NONE)
        or cuda.cuMemSetAccess(at, SIZE, access, 1)
        or at.value
    )

def unmap(at):
    at = ctypes.c_uint64(at)
    return cuda.cuMemUnmap(at, SIZE) or cuda.cuMemAddressFree(at, SIZE)

def listen(path):
    global listener
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

def send(handle, path):
    file = ctypes.c_int()
    code = cuda.cuMemExportToShareableHandle(ctypes.byref(file), ctypes.c_uint64(handle), 1, NONE)
    if code == 0:
        with socket.socket(socket.AF_UNIX) as to:
            to.connect(path)
            socket.send_fds(to, [b"."], [file.value])
        os.close(file.value)
    return code

def receive():
    with listener.accept()[0] as sender:
        file = socket.recv_fds(sender, 1, 1)[1][0]
    handle = ctypes.c_uint64()
    code = cuda.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(file), 1)
    os.close(file)
    return code or handle.value
"#;

const BYTES: u64 = 2 * MIB;

#[derive(Debug, Clone, Copy)]
enum Step {
    Create { by: usize },
    Share { which: usize },
    Map { by: usize, which: usize },
    Unmap { by: usize, which: usize },
    Retain { by: usize, which: usize },
    Release { by: usize, which: usize },
    Write { by: usize, which: usize, value: u8 },
    Pause { who: usize, keep: bool, shared: bool },
    Resume { who: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0..8_usize;
    let by = || 0..2_usize;
    prop_oneof![
        3 => by().prop_map(|by| Step::Create { by }),
        4 => which().prop_map(|which| Step::Share { which }),
        3 => (by(), which()).prop_map(|(by, which)| Step::Map { by, which }),
        1 => (by(), which()).prop_map(|(by, which)| Step::Unmap { by, which }),
        1 => (by(), which()).prop_map(|(by, which)| Step::Retain { by, which }),
        1 => (by(), which()).prop_map(|(by, which)| Step::Release { by, which }),
        4 => (by(), which(), any::<u8>()).prop_map(|(by, which, value)| Step::Write { by, which, value }),
        4 => (by(), any::<bool>(), prop::bool::weighted(0.3)).prop_map(|(who, keep, shared)| Step::Pause { who, keep, shared }),
        3 => by().prop_map(|who| Step::Resume { who }),
    ]
}

/// What a process has of a piece of memory.
#[derive(Debug, Default)]
struct Use {
    handles: Vec<u64>,
    at: Option<u64>,
}

impl Use {
    fn is_any(&self) -> bool {
        self.at.is_some() || !self.handles.is_empty()
    }
}

#[derive(Debug)]
struct Piece {
    owner: usize,
    uses: [Use; 2],
    value: u8,
    is_paused: bool,
    /// The other one has imported it, and has set it aside. What is aside is not lent.
    is_aside: bool,
}

impl Piece {
    fn other(&self) -> usize {
        1 - self.owner
    }

    fn is_lent(&self) -> bool {
        self.uses[self.other()].is_any() && !self.is_aside
    }
}

/// Where a program waits for descriptors.
fn listens_at(machine: &Machine, who: usize) -> String {
    machine.folder.path().join(who.to_string()).display().to_string()
}

struct Exporting {
    machine: Machine,
    programs: [Program; 2],
    pieces: Vec<Piece>,
}

impl Exporting {
    fn new() -> Self {
        let machine = Machine::pair();
        let mut programs = ["one", "two"].map(|name| machine.python(name));
        for (who, program) in programs.iter_mut().enumerate() {
            let path = listens_at(&machine, who);
            assert_eq!(program.ask(&format!("exec({CALLS:?}, globals()) or listen('{path}')")), "None");
        }
        let mut two = Self { machine, programs, pieces: Vec::new() };
        // The first allocation starts the socket.
        for who in 0..2 {
            let handle = two.programs[who].number("create()");
            assert_eq!(two.programs[who].ask(&format!("release({handle})")), "0");
        }
        two
    }

    /// A program is held exactly while memory of its own is paused, or memory that it has imported.
    fn is_held(&self, who: usize) -> bool {
        self.pieces.iter().any(|piece| piece.is_paused && (piece.owner == who || piece.uses[who].is_any()))
    }

    fn apply(&mut self, step: Step) -> Result<(), TestCaseError> {
        let held = [0, 1].map(|who| self.is_held(who));
        let programs = &mut self.programs;
        let count = self.pieces.len();
        let chosen = |which: usize| which % count;
        match step {
            Step::Create { by } if count < 8 => {
                let mut uses = [Use::default(), Use::default()];
                let handle = programs[by].number("create()");
                let at = programs[by].number(&format!("map_({handle})"));
                uses[by] = Use { handles: vec![handle], at: Some(at) };
                // A held program could not write.
                if !held[by] {
                    prop_assert_eq!(programs[by].ask(&format!("fill({at}, 0, {BYTES})")), "0");
                }
                self.pieces.push(Piece { owner: by, uses, value: 0, is_paused: false, is_aside: false });
            }
            Step::Share { which } if count > 0 => {
                let piece = &mut self.pieces[chosen(which)];
                let (owner, other) = (piece.owner, piece.other());
                // The export of paused memory waits for the resume, and the program with it.
                if let Some(handle) = piece.uses[owner].handles.first().filter(|_| !piece.is_paused && !piece.uses[other].is_any()) {
                    let path = listens_at(&self.machine, other);
                    prop_assert_eq!(programs[owner].ask(&format!("send({handle}, '{path}')")), "0");
                    piece.uses[other].handles.push(programs[other].number("receive()"));
                }
            }
            Step::Map { by, which } if count > 0 => {
                let own = &mut self.pieces[chosen(which)].uses[by];
                if let (Some(handle), None) = (own.handles.first(), own.at) {
                    own.at = Some(programs[by].number(&format!("map_({handle})")));
                }
            }
            Step::Unmap { by, which } if count > 0 => {
                if let Some(at) = self.pieces[chosen(which)].uses[by].at.take() {
                    prop_assert_eq!(programs[by].ask(&format!("unmap({at})")), "0");
                }
            }
            Step::Retain { by, which } if count > 0 => {
                let own = &mut self.pieces[chosen(which)].uses[by];
                if let Some(at) = own.at {
                    own.handles.push(programs[by].number(&format!("retain({at})")));
                }
            }
            Step::Release { by, which } if count > 0 => {
                if let Some(handle) = self.pieces[chosen(which)].uses[by].handles.pop() {
                    prop_assert_eq!(programs[by].ask(&format!("release({handle})")), "0");
                }
            }
            Step::Write { by, which, value } if count > 0 && !held[by] => {
                let piece = &mut self.pieces[chosen(which)];
                if let Some(at) = piece.uses[by].at {
                    prop_assert_eq!(programs[by].ask(&format!("fill({at}, {value}, {BYTES})")), "0");
                    piece.value = value;
                }
            }
            Step::Pause { who, keep, shared } => {
                // Also what it has given up: it is there as long as the other one has it.
                let is_its = |piece: &&mut Piece| piece.owner == who;
                let is_kept = |piece: &&mut Piece| !piece.is_paused && piece.is_lent() && !shared;
                let is_refused = !keep && self.pieces.iter_mut().filter(is_its).any(|piece| is_kept(&piece));
                let registered = if keep { "keep" } else { "refuse" };
                if shared {
                    let pid = programs[who].pid().to_string();
                    let output = self.machine.vramctl(&["pause", "--pid", &pid, "--shared", "--registered", registered]);
                    prop_assert_eq!(output.code == Some(0), !is_refused, "{:?}", output);
                } else {
                    let wanted = json!({ "request": "pause", "hold_ms": 60_000, "registered": registered });
                    let answer = self.machine.answer(&programs[who], &wanted);
                    prop_assert_eq!(&answer["reply"], if is_refused { "error" } else { "done" }, "{}", answer);
                }
                if !is_refused {
                    for piece in self.pieces.iter_mut().filter(is_its).filter(|piece| !is_kept(piece)) {
                        (piece.is_paused, piece.is_aside) = (true, piece.is_aside || piece.is_lent());
                    }
                }
            }
            Step::Resume { who } => {
                let answer = self.machine.request(&programs[who], "resume", &[]);
                prop_assert_eq!(&answer["reply"], "done", "{}", answer);
                self.pieces.iter_mut().filter(|piece| piece.owner == who).for_each(|piece| piece.is_paused = false);
            }
            _ => (),
        }
        // What is aside comes back by itself when its owner is resumed, unless the process stays held anyway.
        for who in 0..2 {
            let stays_held = self.has_paused(who);
            for piece in self.pieces.iter_mut().filter(|piece| piece.other() == who) {
                piece.is_aside &= piece.uses[who].is_any() && (stays_held || piece.is_paused);
            }
        }
        self.pieces.retain(|piece| piece.uses.iter().any(Use::is_any));
        Ok(())
    }

    fn has_paused(&self, who: usize) -> bool {
        self.pieces.iter().any(|piece| piece.owner == who && piece.is_paused)
    }

    /// Bytes of the other one's memory that a process has imported and set aside.
    fn aside(&self, who: usize) -> u64 {
        let status = self.machine.request(&self.programs[who], "status", &[]);
        let borrowed = status["borrowed"].as_array().cloned().unwrap_or_default();
        borrowed.iter().map(|borrowed| borrowed["paused_bytes"].as_u64().unwrap()).sum()
    }

    /// Each process is held or not, as it should be, and finds the contents that either wrote last.
    fn check(&mut self) -> Result<(), TestCaseError> {
        let there = self.pieces.iter().filter(|piece| !piece.is_paused).count() as u64;
        // What has been imported comes back a little after its owner's memory.
        let settled = common::patiently(|| if self.machine.used() == there * BYTES { Ok(()) } else { Err(()) });
        let told = || [0, 1].map(|who| self.machine.request(&self.programs[who], "status", &[]).to_string());
        prop_assert!(settled.is_ok(), "{} bytes in use: {:?}, {:?}", self.machine.used(), self.pieces, told());
        for who in 0..2 {
            let is_held = self.is_held(who);
            let aside = self.pieces.iter().filter(|piece| piece.other() == who && piece.is_aside).count() as u64 * BYTES;
            common::eventually(&format!("process {who}: {:?}", self.pieces), || {
                self.machine.is_held(&self.programs[who]) == is_held && self.aside(who) == aside
            });
            for piece in self.pieces.iter().filter(|_| !is_held) {
                if let Some(at) = piece.uses[who].at {
                    let found = self.programs[who].ask(&format!("read({at}, {BYTES})"));
                    prop_assert_eq!(found, format!("[{}]", piece.value), "in process {}: {:?}", who, piece);
                }
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(3), max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_sequences_of_two_processes_behave_like_the_model(steps in prop::collection::vec(step(), 1..40)) {
        let mut two = Exporting::new();
        for step in steps {
            println!("{step:?}");
            two.apply(step)?;
            two.check()?;
        }
        for who in 0..2 {
            two.apply(Step::Resume { who })?;
        }
        two.check()?;
        while !two.pieces.is_empty() {
            for by in 0..2 {
                two.apply(Step::Unmap { by, which: 0 })?;
                two.apply(Step::Release { by, which: 0 })?;
            }
        }
        prop_assert_eq!(two.machine.used(), 0);
    }
}
