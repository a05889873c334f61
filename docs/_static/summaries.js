// The arrows with which the theme opens parts of its navigation have no names, which screen readers read.
document.addEventListener("DOMContentLoaded", () => {
    for (const summary of document.querySelectorAll("summary:not([aria-label])")) {
        if (!summary.textContent.trim()) {
            const link = summary.closest("li")?.querySelector("a");
            summary.setAttribute("aria-label", `Pages of ${link ? link.textContent.trim() : "this part"}`);
        }
    }
});
