//! Sets the SONAME under which programs look for the runtime.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        "-soname,libcudart.so.13",
        // Like the real runtime, it calls its own functions, not a preloaded library's.
        "-Bsymbolic",
        "-z,nodelete",
    ] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
}
