//! What the registry of managed memory costs, by the number of allocations, on the simulated GPU: to find an address, one in the middle and one
//! that is not managed; and to record an allocation and take it out, with what the simulated driver takes for it.
//!
//! `cargo bench --bench registry`
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Gpu, MIB, free, malloc_tagged};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use vramctl_core::memory::Memory;
use vramctl_model::Policy;

fn allocate() -> u64 {
    malloc_tagged("weights", Some(Policy::Discard), 2 * MIB).expect("there is room")
}

fn registry(criterion: &mut Criterion) {
    let _gpu = Gpu::take();
    for count in [1, 100] {
        let addresses: Vec<_> = (0..count).map(|_| allocate()).collect();
        let address = addresses[count / 2];
        let mut bench = |name: &str, work: &mut dyn FnMut()| {
            criterion.bench_with_input(BenchmarkId::new(name, count), &count, |bencher, _| bencher.iter(&mut *work));
        };
        bench("find an address", &mut || {
            black_box(Memory::get().registry.find(black_box(address)));
        });
        bench("find an address in the middle", &mut || {
            black_box(Memory::get().registry.find(black_box(address + 4096)));
        });
        bench("find an address that is not managed", &mut || {
            black_box(Memory::get().registry.find(black_box(4096)));
        });
        bench("allocate and free", &mut || {
            free(allocate());
        });
        for address in addresses {
            free(address);
        }
    }
}

criterion_group!(benches, registry);
criterion_main!(benches);
