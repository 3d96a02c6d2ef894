//! Graphs: the nodes collected by a capture, or added one by one, replayed in that order.

use crate::abi::{Handle, InstantiateParams, Out};
use crate::codes::{INVALID_HANDLE, INVALID_VALUE, Outcome};
use crate::context;
use crate::copy::Work;
use crate::driver::{self, State, state};
use crate::kernel::Code;
use crate::stream;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug)]
struct Graph {
    nodes: Arc<[Work]>,
    /// The nodes' handles, as programs see them.
    handles: Vec<Handle>,
}

/// This process's graphs. They hold addresses, not memory.
#[derive(Debug, Default)]
pub struct Graphs {
    graphs: HashMap<Handle, Graph>,
    executables: HashMap<Handle, Executable>,
}

#[derive(Debug)]
struct Executable {
    nodes: Arc<[Work]>,
    _code: Code,
}

impl Graphs {
    /// Stores a new graph.
    pub fn add(&mut self, nodes: Vec<Work>) -> Handle {
        let handle = driver::new_handle();
        let handles = nodes.iter().map(|_| driver::new_handle()).collect();
        self.graphs.insert(handle, Graph { nodes: nodes.into(), handles });
        handle
    }

    /// Adds a node to a graph.
    pub fn push(&mut self, graph: Handle, work: Work) -> Outcome<Handle> {
        let graph = self.graphs.get_mut(&graph).ok_or(INVALID_VALUE)?;
        let handle = driver::new_handle();
        graph.nodes = graph.nodes.iter().cloned().chain([work]).collect();
        graph.handles.push(handle);
        Ok(handle)
    }

    /// Number of graphs and executable graphs.
    pub fn live(&self) -> usize {
        self.graphs.len() + self.executables.len()
    }
}

/// `cuGraphCreate`.
pub fn create(graph: Out<Handle>, flags: u32) -> Outcome {
    graph.required()?;
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    graph.put(state().graphs.add(Vec::new()))
}

/// `cuGraphDestroy`.
pub fn destroy(graph: Handle) -> Outcome {
    state().graphs.graphs.remove(&graph).map(drop).ok_or(INVALID_VALUE)
}

/// `cuGraphInstantiate`: the targets of memsets must be accessible.
pub fn instantiate(executable: Out<Handle>, graph: Handle) -> Outcome {
    executable.required()?;
    let mut state = state();
    let nodes = Arc::clone(&state.graphs.graphs.get(&graph).ok_or(INVALID_VALUE)?.nodes);
    let device = context::current_in(&state.contexts)?.device;
    if !nodes.iter().all(|node| node.finds_its_target(&state, device)) {
        return Err(INVALID_VALUE);
    }
    let handle = driver::new_handle();
    state.graphs.executables.insert(handle, Executable { nodes, _code: Code::load(device)? });
    executable.put(handle)
}

/// `cuGraphInstantiateWithParams`: the upload, too, is a no-op in a stream that exists. `in_stream` gives the meaning of its handle.
pub fn instantiate_with(
    executable: Out<Handle>,
    graph: Handle,
    params: Out<InstantiateParams>,
    in_stream: fn(Handle) -> Handle,
) -> Outcome {
    /// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
    const UPLOAD: u64 = 2;
    /// `CUDA_GRAPH_INSTANTIATE_ERROR`; success is 0.
    const FAILED: u32 = 1;
    let given = params.get()?;
    let found = if given.flags & UPLOAD == 0 { Ok(()) } else { stream::find(&mut state(), in_stream(given.upload_stream)).map(drop) };
    let done = found.and_then(|()| instantiate(executable, graph));
    params.put(InstantiateParams { result: if done.is_ok() { 0 } else { FAILED }, ..given })?;
    done
}

/// `cuGraphExecDestroy`: launched work still completes.
pub fn destroy_executable(executable: Handle) -> Outcome {
    state().graphs.executables.remove(&executable).map(drop).ok_or(INVALID_VALUE)
}

/// `cuGraphLaunch`.
pub fn launch(executable: Handle, handle: Handle) -> Outcome {
    let mut state = state();
    let stream = stream::find(&mut state, handle)?;
    let State { graphs, .. } = &mut *state;
    let nodes = Arc::clone(&graphs.executables.get(&executable).ok_or(INVALID_HANDLE)?.nodes);
    stream::submit(&mut state, &stream, Work::Graph { nodes })?;
    Ok(())
}

/// `cuGraphUpload`: a no-op.
pub fn upload(executable: Handle, handle: Handle) -> Outcome {
    let mut state = state();
    stream::find(&mut state, handle)?;
    if state.graphs.executables.contains_key(&executable) { Ok(()) } else { Err(INVALID_HANDLE) }
}

/// `cuGraphGetNodes`: without a buffer it returns only the count.
pub fn nodes(graph: Handle, nodes: Out<Handle>, count: Out<usize>) -> Outcome {
    let state = state();
    let handles = &state.graphs.graphs.get(&graph).ok_or(INVALID_VALUE)?.handles;
    if nodes.is_null() {
        return count.put(handles.len());
    }
    let room = count.get()?;
    nodes.put_all(handles.iter().copied().chain(std::iter::repeat(0)).take(room));
    count.put(handles.len().min(room))
}
