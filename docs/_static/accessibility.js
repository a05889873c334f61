// The arrows with which the theme opens parts of its navigation have no names, which screen readers read.
document.addEventListener("DOMContentLoaded", () => {
    for (const summary of document.querySelectorAll("summary:not([aria-label])")) {
        if (!summary.textContent.trim()) {
            const link = summary.closest("li")?.querySelector("a");
            summary.setAttribute("aria-label", `Pages of ${link ? link.textContent.trim() : "this part"}`);
        }
    }
});

// The keyboard reaches what scrolls by itself, which depends on the window's width and on images that are loaded.
function reachScrolledBoxes() {
    for (const box of document.querySelectorAll(".bd-article figure, .math-block")) {
        if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
        else box.removeAttribute("tabindex");
    }
}
window.addEventListener("load", reachScrolledBoxes);
window.addEventListener("resize", reachScrolledBoxes);
