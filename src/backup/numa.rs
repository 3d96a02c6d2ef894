//! Host memory near the device: on a machine of several memory nodes, copies to the far ones cross the link between the
//! processors.

use libc::{c_int, c_long, c_ulong};
use std::fs;
use std::marker::PhantomData;
use std::ptr;
use vramctl_driver::Current;
use vramctl_host::PerProcess;

/// As many nodes as the kernel can be built for.
const NODES: usize = 1024;
type Mask = [c_ulong; NODES / c_ulong::BITS as usize];

/// For as long as it lives, memory that this thread touches first comes from one node, while there is some.
pub struct Near {
    mode: c_int,
    nodes: Mask,
    /// Of a thread.
    not_send: PhantomData<*const ()>,
}

impl Near {
    /// The node nearest to the device of the current context. `None`: there is no choice, or the system does not let us
    /// have it (containers often do not). Then memory comes from where it comes from.
    pub fn to(current: &Current) -> Option<Self> {
        static CHOICE: PerProcess<bool> =
            PerProcess::new(|| several_nodes(&fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default()));
        if !*CHOICE.get() {
            return None;
        }
        Self::to_node(current.host_node()?)
    }

    fn to_node(node: usize) -> Option<Self> {
        let mut nodes = Mask::default();
        *nodes.get_mut(node / c_ulong::BITS as usize)? |= 1 << (node % c_ulong::BITS as usize);
        let before = Self::of_thread()?;
        set(libc::MPOL_PREFERRED, &nodes).then_some(before)
    }

    /// What the thread has now.
    fn of_thread() -> Option<Self> {
        let (mut mode, mut nodes) = (0, Mask::default());
        let no_address = ptr::null::<u8>();
        // SAFETY: both are writable, the mask for the number of nodes that is given.
        let answer: c_long = unsafe {
            libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, nodes.as_mut_ptr(), NODES as c_ulong, no_address, 0 as c_ulong)
        };
        (answer == 0).then_some(Self { mode, nodes, not_send: PhantomData })
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        set(self.mode, &self.nodes);
    }
}

/// Sets the calling thread's policy.
fn set(mode: c_int, nodes: &Mask) -> bool {
    // SAFETY: the mask is readable for the number of nodes that is given.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes.as_ptr(), NODES as c_ulong) == 0 }
}

/// Whether a list of nodes such as `0-1` or `0,2` has more than one.
fn several_nodes(list: &str) -> bool {
    list.trim().contains(['-', ','])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thread may be the program's own: what it had, it must have again.
    #[test]
    fn the_threads_policy_is_lent() {
        let policy = || Near::of_thread().map(std::mem::ManuallyDrop::new).map(|near| (near.mode, near.nodes));
        let before = policy();
        let Some(near) = Near::to_node(0) else {
            println!("not run: this system has no memory policies, or does not permit them");
            return;
        };
        let (mode, nodes) = policy().unwrap();
        assert_eq!((mode, nodes[0]), (libc::MPOL_PREFERRED, 1));
        drop(near);
        assert_eq!(policy(), before);
        assert!(Near::to_node(NODES).is_none());
    }

    #[test]
    fn one_node_is_no_choice() {
        assert!(!several_nodes("0\n") && !several_nodes(""));
        assert!(several_nodes("0-1\n") && several_nodes("0,4"));
    }
}
