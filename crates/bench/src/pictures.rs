//! The pictures of docs/performance.md, drawn from the same figures as its tables.

use std::path::Path;

use anyhow::Context as _;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::alternatives::{BARE, library, usual};
use crate::cases::{first_call, growth, replay, soak};
use crate::client::of_clients;
use crate::page::{RATIOS, Ratio};
use crate::results::{MAIN, NOT_DURABLE, ONE_MILLISECOND, Results, Row, SOCKET, figure};

/// The width of a page on a forge.
const WIDTH: u32 = 840;
/// The colours of Okabe and Ito, which people with colour blindness can tell apart.
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(230, 159, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];
const GREY: RGBColor = RGBColor(110, 110, 110);
const FONT: (&str, u32) = ("sans-serif", 13);
const TITLE: (&str, u32) = ("sans-serif", 15);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Draw = fn(&Results, &Area<'_>) -> anyhow::Result<()>;

/// A name in the legend, and a value at each mark of the axis.
type Series = (String, Vec<Option<f64>>);

/// Draws into this directory. A case that was not measured has an empty picture.
pub(crate) fn draw(results: &Results, directory: &Path) -> anyhow::Result<()> {
    let pictures: [(&str, u32, Draw); 5] = [
        ("left.svg", 440, what_is_left),
        ("clients.svg", 340, rate_by_clients),
        ("latency.svg", 240, latency_by_round_trip),
        ("growth.svg", 320, growth_by_size),
        ("soak.svg", 320, soak_over_time),
    ];
    for (name, height, picture) in pictures {
        let file = directory.join(name);
        let area = SVGBackend::new(&file, (WIDTH, height)).into_drawing_area();
        // Otherwise a dark page shines through, and the text is black.
        area.fill(&WHITE)?;
        picture(results, &area).and_then(|()| Ok(area.present()?)).with_context(|| name.to_owned())?;
    }
    Ok(())
}

fn what_is_left(results: &Results, area: &Area<'_>) -> anyhow::Result<()> {
    let names: Vec<_> = RATIOS.iter().map(|ratio| format!("{} / {}", ratio.what, ratio.compared)).collect();
    let in_column = |column: &str| {
        let of = |ratio: &Ratio| results.find(ratio.case, MAIN, column)?.rate_over(ratio.way, ratio.other);
        (column.to_owned(), RATIOS.iter().map(of).collect())
    };
    bars(
        area,
        "The rate with the crate, over the rate of the code beside it",
        &names,
        &[SOCKET, NOT_DURABLE, ONE_MILLISECOND].map(in_column),
    )
}

fn latency_by_round_trip(results: &Results, area: &Area<'_>) -> anyhow::Result<()> {
    let ways = [BARE, usual::NAME, library::NAME];
    let in_column = |column: &str| {
        let table = results.find(first_call::NAME, MAIN, column);
        (column.to_owned(), ways.iter().map(|way| table?.p50(way)).collect())
    };
    bars(area, "Median time of a first call, ms", &ways.map(str::to_owned), &[SOCKET, ONE_MILLISECOND].map(in_column))
}

fn rate_by_clients(results: &Results, area: &Area<'_>) -> anyhow::Result<()> {
    let clients = first_call::CLIENTS;
    let marks: Vec<_> = clients.iter().map(|clients| (clients.ilog2() as i32, clients.to_string())).collect();
    let cases = [
        ("First calls a second", first_call::NAME, first_call::BY_CLIENTS),
        ("Replays a second", replay::NAME, replay::BY_CLIENTS),
    ];
    for (area, (what, case, title)) in area.split_evenly((1, 2)).iter().zip(cases) {
        let tables = clients.map(|clients| results.find(case, title, &of_clients(clients)));
        let rows = tables[0].map(|table| table.rows.as_slice()).unwrap_or_default();
        let rates =
            |row: &Row| (row.way.clone(), tables.iter().map(|table| Some((*table)?.speed(&row.way)?.rate())).collect());
        lines(area, &format!("{what}, by the number of clients"), &marks, &rows.iter().map(rates).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn growth_by_size(results: &Results, area: &Area<'_>) -> anyhow::Result<()> {
    let sizes = [10_000_u64, 1_000_000, 10_000_000];
    let marks: Vec<_> = sizes.iter().map(|size| (size.ilog10() as i32, size.to_string())).collect();
    let calls = [
        ("first calls", growth::FIRST_CALLS),
        ("replays of random keys", growth::REPLAYS),
        ("bare selects of random keys", growth::BARE_SELECTS),
    ];
    let series = calls.map(|(name, title)| {
        let tables = results.titled(growth::NAME, title);
        (name.to_owned(), sizes.map(|size| tables.first()?.p50(&growth::name(size))).to_vec())
    });
    lines(area, "Median time by the number of records, ms", &marks, &series)
}

fn soak_over_time(results: &Results, area: &Area<'_>) -> anyhow::Result<()> {
    let tables = results.titled(soak::NAME, soak::MINUTES);
    let rows = tables.first().map(|table| table.rows.as_slice()).unwrap_or_default();
    let marks: Vec<_> = (1..).map(|minute| (minute, minute.to_string())).take(rows.len()).collect();
    let of = |name: &str, value: fn(&Row) -> Option<f64>| (name.to_owned(), rows.iter().map(value).collect());
    let times = [
        of("median", |row| Some(row.speed.as_ref()?.p50_ms)),
        of("99th percentile", |row| Some(row.speed.as_ref()?.p99_ms)),
    ];
    let sizes = [
        of("memory of the clients", |row| row.costs.get(soak::MEMORY).copied()),
        of("table and indexes", |row| row.costs.get(soak::SIZE).copied()),
    ];
    let halves = area.split_evenly((1, 2));
    lines(&halves[0], "Time of a call by the minute, ms", &marks, &times)?;
    lines(&halves[1], "Size by the minute, MiB", &marks, &sizes)
}

/// Lines over an axis whose marks have places of their own, so that their distances can be logarithmic.
fn lines(area: &Area<'_>, title: &str, marks: &[(i32, String)], series: &[Series]) -> anyhow::Result<()> {
    let (Some((first, _)), Some((last, _))) = (marks.first(), marks.last()) else { return Ok(()) };
    let mut chart = ChartBuilder::on(area)
        .caption(title, TITLE)
        .margin(10)
        .margin_right(36)
        .x_label_area_size(30)
        .y_label_area_size(60)
        .build_cartesian_2d(*first..*last, 0.0..top(series))?;
    let label =
        |place: &i32| marks.iter().find(|(mark, _)| mark == place).map_or_else(String::new, |(_, text)| text.clone());
    chart
        .configure_mesh()
        .x_label_formatter(&label)
        .y_label_formatter(&|value| figure(*value))
        .label_style(FONT)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GREY.mix(0.2))
        .draw()?;
    for ((name, values), colour) in series.iter().zip(COLOURS) {
        let points = || marks.iter().zip(values).filter_map(|((place, _), value)| Some((*place, (*value)?)));
        chart
            .draw_series(LineSeries::new(points(), colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(3)));
        if marks.len() < 10 {
            chart.draw_series(points().map(|point| Circle::new(point, 3, colour.filled())))?;
        }
    }
    legend(&mut chart)
}

/// Bars that lie, because their names are long.
fn bars(area: &Area<'_>, title: &str, names: &[String], series: &[Series]) -> anyhow::Result<()> {
    let count = names.len() as f64;
    let mut chart = ChartBuilder::on(area)
        .caption(title, TITLE)
        .margin(10)
        .margin_right(30)
        .x_label_area_size(30)
        .y_label_area_size(330)
        .build_cartesian_2d(0.0..top(series), 0.0..count)?;
    let label = |place: &f64| {
        let name = (place.fract() == 0.5).then(|| names.get((count - place) as usize)).flatten();
        name.cloned().unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_y_mesh()
        // A mark at each half.
        .y_labels(2 * names.len() + 1)
        .x_label_formatter(&|value| figure(*value))
        .y_label_formatter(&label)
        .label_style(FONT)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GREY.mix(0.2))
        .draw()?;
    let height = 0.8 / series.len() as f64;
    for (at, ((name, values), colour)) in series.iter().zip(COLOURS).enumerate() {
        let bar = |(group, value): (usize, &Option<f64>)| {
            let top = count - group as f64 - 0.1 - at as f64 * height;
            Some(Rectangle::new([(0.0, top), ((*value)?, top - height)], colour.filled()))
        };
        chart
            .draw_series(values.iter().enumerate().filter_map(bar))?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 16, y + 5)], colour.filled()));
    }
    legend(&mut chart)
}

fn legend<'a, C: CoordTranslate>(chart: &mut ChartContext<'a, SVGBackend<'a>, C>) -> anyhow::Result<()> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font(FONT)
        .background_style(WHITE.mix(0.8))
        .border_style(GREY.mix(0.3))
        .draw()?;
    Ok(())
}

/// The end of the axis, with room for the legend.
fn top(series: &[Series]) -> f64 {
    let values = series.iter().flat_map(|(_, values)| values).flatten();
    (1.1 + 0.1 * series.len() as f64) * values.copied().fold(f64::MIN_POSITIVE, f64::max)
}
