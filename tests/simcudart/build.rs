//! Gives the library the name under which programs look for the runtime.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        "-soname,libcudart.so.13",
        // As the real runtime: it calls its own functions, not those of a preloaded library.
        "-Bsymbolic",
        "-z,nodelete",
    ] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
}
