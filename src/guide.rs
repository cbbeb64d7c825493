#![doc = include_str!("guide/guide.md")]

macro_rules! pages {
    ($($name:ident)*) => {
        $(
            #[doc = include_str!(concat!("guide/", stringify!($name), ".md"))]
            pub mod $name {}
        )*
    };
}

pages! {
    promises modes words
    axum http clients events steps nothing_escapes testing migrations
    production sizing monitoring runbook settle failures poolers larger symptoms
    settings command_line standards metrics table
}
